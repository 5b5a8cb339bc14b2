"""Structured output: the tokens that keep a text within a JSON schema, a regex, a Lark grammar or a
choice.

llguidance (the extra `grammar`) reads grammars and finds those tokens. Our part is how texts
end (it knows one id for that, models know several), and going back from anywhere, also from tokens
that are not allowed. Every tokenization of a text that matches is allowed; a text is what tokens
add behind others, as SentencePiece's decoders drop a first space. Knows no models.
"""

from __future__ import annotations

import json
import math
from itertools import takewhile
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from foretoken.errors import ControlError, InputError, to_one_line
from foretoken.sampling.checks import Structured
from foretoken.shared_cache import SharedCache
from foretoken.text.decoding import REPLACEMENT, decode
from foretoken.text.json_schema import exact_schema

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

# Between JSON's tokens: blanks cost tokens, and where JSON allows any, weak models never end
SPACES = {"whitespace_flexible": False, "key_separator": ":[ ]?", "item_separator": ",[ ]?"}
SETTING = '%llguidance {"no_forcing": true}'
KEPT = 32  # grammars kept compiled per vocabulary
VOCABULARIES = 16  # per tokenizer: one for each set of EOS ids
SAMPLED = 256  # tokens whose spelling is compared


class Vocabulary:
    """A tokenizer as llguidance knows it, over V ids of which `ends` end a text.

    llguidance's form takes a second to make and has one EOS token, so all vocabularies of a
    tokenizer share the form with the model's `own` first EOS token."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        V: int,
        eos: frozenset[int],
        own: frozenset[int],
        lexicons: SharedCache[LLTokenizer],
    ) -> None:
        self.V = V
        self.ends = sorted(id for id in eos if id < V)
        if not self.ends:
            raise InputError(
                "structured output ends with an EOS token and the model names none; set "
                "eos_token_id in its generation config"
            )
        end = min((id for id in own if id < min(V, len(tokenizer))), default=self.ends[0])
        self.words = lexicons.get((end, len(tokenizer)), _lexicon, tokenizer, end)
        self.never = [] if end in self.ends else [end]  # EOS to llguidance alone
        self._grammars: SharedCache[Grammar] = SharedCache(KEPT)

    def grammar(self, structured: Structured) -> Grammar:
        """Compile a row's wish. InputError where it does not compile or cannot be followed from its
        first tokens on."""
        return self._grammars.get(structured, self._grammar, structured)

    def _grammar(self, structured: Structured) -> Grammar:
        return Grammar(self, structured.kind, _compiled(structured, self.words))


def vocabulary(
    tokenizer: PreTrainedTokenizerBase | None,
    V: int,
    eos: frozenset[int],
    own: frozenset[int] = frozenset(),
) -> Vocabulary:
    """Return the vocabulary of a fast tokenizer, V being the rows of the output layer, `eos` the
    request's EOS ids and `own` those of the model's configuration; cached as long as the tokenizer
    lives. InputError if llguidance is missing or cannot take the tokenizer."""
    if tokenizer is None or not getattr(tokenizer, "is_fast", False):
        raise InputError(
            "structured output needs a fast tokenizer of transformers, not "
            f"{type(tokenizer).__name__}; give one as tokenizer="
        )
    fresh: _Made = (SharedCache(VOCABULARIES), SharedCache(VOCABULARIES))
    vocabularies, lexicons = _VOCABULARIES.setdefault(tokenizer, fresh)
    key = (V, eos, own, len(tokenizer))  # tokens may be added to a tokenizer
    return vocabularies.get(key, Vocabulary, tokenizer, V, eos, own, lexicons)


_Made = tuple[SharedCache[Vocabulary], "SharedCache[LLTokenizer]"]
_VOCABULARIES: WeakKeyDictionary[PreTrainedTokenizerBase, _Made] = WeakKeyDictionary()


class Grammar:
    """A grammar compiled over a vocabulary, of which every row takes a matcher."""

    def __init__(self, vocabulary: Vocabulary, kind: str, compiled: LLMatcher) -> None:
        self.vocabulary = vocabulary
        self.kind = kind
        self._compiled = compiled
        self._require_texts()

    def matcher(self) -> GrammarMatcher:
        """A matcher before its first token."""
        return GrammarMatcher(self)

    def fed(self, tokens: list[int]) -> LLMatcher:
        """llguidance's own matcher behind `tokens`, which it allows."""
        state = self._compiled.deep_copy()
        state.consume_tokens(tokens)
        return state

    def _require_texts(self) -> None:
        """InputError where no token can begin a text, or none goes on where its forced beginning
        ends. A failure further on is found when a text gets there."""
        first = self.matcher()
        for token in first.find_forced_tokens():
            first.push(token)
        if not first.allowed().any():
            raise _refused(self.kind, "no text of this vocabulary satisfies it")


class GrammarMatcher:
    """One row's place in its grammar.

    Live at first; *ended* behind an EOS token where the text may end; *dead* behind a token that
    the grammar does not allow, and behind anything that follows an end. `pop` undoes each of them.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._state = grammar.fed([])
        self._tokens: list[int] = []  # what it consumed; EOS and what is not allowed stay outside
        self._beyond = 0  # tokens since it is live no longer
        self._closed = False  # whether the first of them was an end
        self._forced: list[int] | None = None  # behind the last token, once it was asked for

    @property
    def ended(self) -> bool:
        return self._beyond == 1 and self._closed

    @property
    def dead(self) -> bool:
        return self._beyond > 0 and not self.ended

    def push(self, token: int) -> None:
        """Go on by any token."""
        self._forced = None
        if self._beyond:
            self._beyond += 1
        elif token in self._vocabulary.ends:
            self._beyond, self._closed = 1, self._state.is_accepting()
        elif token not in self._vocabulary.never and self._state.try_consume_tokens([token]):
            self._tokens.append(token)
        else:
            self._beyond, self._closed = 1, False

    def pop(self) -> None:
        """Undo the last push that was not undone; IndexError where there is none."""
        self._forced = None
        if self._beyond:
            self._beyond -= 1
        else:
            self._tokens.pop()
            self._state.rollback(1)
        if self._state.is_error():  # it never recovers, and some Lark grammars cannot go back
            self._state = self._grammar.fed(self._tokens)

    def allowed(self) -> Tensor:
        """The tokens that may come next, bool `[V]` on the CPU; none unless it is live."""
        V, ends = self._vocabulary.V, self._vocabulary.ends
        if self._beyond:
            return torch.zeros(V, dtype=torch.bool)
        bits = np.frombuffer(self._state.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, count=V, bitorder="little").view(np.bool_)
        mask[ends] = self._state.is_accepting()
        mask[self._vocabulary.never] = False
        return torch.from_numpy(mask)

    def __call__(self, scores: Tensor) -> Tensor:
        """`scores [V]` on any device with -inf for what is not allowed; as they are behind an end,
        where nothing is kept. ControlError where no token is allowed."""
        if self.ended:
            return scores
        mask = self.allowed()
        if not mask.numpy().any():  # 30 times as fast as torch's at V = 128,000
            raise ControlError(self._stuck()).about("structured")
        return torch.where(mask.to(scores.device), scores, -math.inf)

    def find_forced_tokens(self) -> list[int]:
        """The tokenizer's spelling of the text that must follow, if any. They are draft tokens:
        other tokens spell that text too, and its last token may go on."""
        if self._forced is None:
            self._forced = [] if self._beyond else self._spelled()
        return list(self._forced)

    def _spelled(self) -> list[int]:
        tokens = self._vocabulary.words.tokenize_bytes(self._state.compute_ff_bytes())
        tokens = tokens[: self._state.validate_tokens(tokens)]  # a normalizer may change the text
        V, ends = self._vocabulary.V, self._vocabulary.ends
        return list(takewhile(lambda token: token < V and token not in ends, tokens))

    def _stuck(self) -> str:
        """Why no token is allowed."""
        name = f"structured output's {self._grammar.kind}"
        if self._beyond:
            return f"{name} is left by the text; draw tokens that it allows"
        reason = _reason(self._state.get_error())
        if not reason or reason.startswith("NoExtension"):
            reason = "no token continues the text"
        return f"{name} cannot be followed after {len(self._tokens)} tokens: {reason}; correct it"


def _llguidance():  # not annotated: the type is the module's
    """Import llguidance, late as it is an extra; InputError where it is missing."""
    try:
        import llguidance
    except ImportError:
        raise InputError(
            "structured output needs llguidance; pip install 'foretoken[grammar]'"
        ) from None
    return llguidance


def _lexicon(tokenizer: Any, end: int) -> LLTokenizer:
    """llguidance's form of a fast tokenizer."""
    llguidance = _llguidance()
    if end >= len(tokenizer):
        raise InputError(
            f"structured output ends with an EOS token and this tokenizer has none of id {end}; "
            "set eos_token_id in the model's generation config"
        )
    try:
        lexicon = llguidance.LLTokenizer(spelled(tokenizer), eos_token=end)
    except ValueError as error:
        raise InputError(
            f"structured output cannot read this tokenizer: {to_one_line(error)}; leave structured out"
        ) from None
    _require_spelling(lexicon, tokenizer)
    return lexicon


def spelled(tokenizer: Any) -> str:
    """A fast tokenizer as llguidance reads it."""
    spelling = json.loads(tokenizer.backend_tokenizer.to_str())
    spelling |= {"padding": None, "truncation": None, "decoder": _decoder(spelling["decoder"])}
    return json.dumps(spelling)


def _decoder(decoder: dict[str, Any] | None) -> dict[str, Any] | None:
    """A tokenizer's decoder, with Metaspace, which llguidance overlooks, as what it does within a
    text."""
    parts: list[dict[str, Any]] = [decoder] if decoder else []
    if decoder and decoder["type"] == "Sequence":
        parts = decoder["decoders"]
    if not any(part["type"] == "Metaspace" for part in parts):
        return decoder
    plain = [
        {"type": "Replace", "pattern": {"String": part["replacement"]}, "content": " "}
        if part["type"] == "Metaspace"
        else part
        for part in parts
    ]
    return {"type": "Sequence", "decoders": [*plain, {"type": "ByteFallback"}]}


def _require_spelling(lexicon: LLTokenizer, tokenizer: PreTrainedTokenizerBase) -> None:
    """InputError where llguidance spells a token otherwise than the tokenizer, of a sample of them;
    each stands behind a letter, as decoders may treat a text's beginning apart."""
    text = [id for id in range(lexicon.vocab_size) if not lexicon.is_special_token(id)]
    letter = next((id for id in text if lexicon.decode_bytes([id]).isalnum()), None)
    if letter is None:
        return
    for token in text[:: -(-len(text) // SAMPLED)]:
        spelled = lexicon.decode_bytes([letter, token]).decode(errors="replace")
        decoded = decode(tokenizer, [letter, token])
        if REPLACEMENT not in spelled and spelled != decoded:
            raise InputError(
                f"structured output cannot read this tokenizer: its token {token} decodes to "
                f"{decoded[1:]!r}, not {spelled[1:]!r}; leave structured out"
            )


def _compiled(structured: Structured, lexicon: LLTokenizer) -> LLMatcher:
    """InputError where it does not compile."""
    compiled = _llguidance().LLMatcher(lexicon, source(structured), log_level=0)
    if compiled.is_error():
        raise _refused(structured.kind, _reason(compiled.get_error()))
    return compiled


def objection(schema: Any) -> str | None:
    """Say why no text can be held to a JSON schema, or None."""
    matcher = _llguidance().LLMatcher
    return _reason(matcher.validate_grammar(source(Structured("json_schema", schema)))) or None


def source(structured: Structured) -> str:
    """A wish in llguidance's own language; InputError where it is not what its kind says."""
    kind, text = structured
    try:
        return json.dumps({"grammars": _grammars(kind, text)})
    except (ValueError, RecursionError) as error:
        raise _refused(kind, to_one_line(error)) from None


def _grammars(kind: str, text: str) -> list[dict[str, Any]]:
    """Return the grammars that llguidance compiles: the first is the one that a text follows.
    ValueError where a grammar's text is not what its kind says."""
    if kind == "json_schema":
        schema = exact_schema(json.loads(text), SPACES)
        return [_lark("start: @schema"), {"name": "schema", "json_schema": schema}]
    if kind == "regex":
        escaped = json.loads(_llguidance().LLMatcher.grammar_from_regex(text))["grammars"][0]
        return [_lark(escaped["lark_grammar"])]
    if kind == "lark":
        return [_lark(text)]
    choice = json.loads(text)
    if not isinstance(choice, list) or not choice or not all(isinstance(x, str) for x in choice):
        raise ValueError("it is not a JSON list of strings")
    return [_lark(f"start: {' | '.join(map(json.dumps, choice))}")]


def symbol(structured: Structured) -> str:
    """A grammar as a symbol of another one, in Lark. InputError where it is not what its kind
    says."""
    kind, text = structured
    try:
        grammars = _grammars(kind, text)
    except (ValueError, RecursionError) as error:
        raise _refused(kind, to_one_line(error)) from None
    if kind == "json_schema":
        return f"%json {json.dumps(grammars[1]['json_schema'])}"
    return f"%lark {{\n{grammars[0]['lark_grammar'].removesuffix(SETTING)}}}"


def _lark(text: str) -> dict[str, Any]:
    """A Lark grammar whose masks hold every token that goes on. Where only one text can follow,
    they would hold one token otherwise: what the tokenizer makes of that text, which may even spell
    another one, or have no row in the output layer."""
    return {"lark_grammar": f"{text}\n{SETTING}"}


def _reason(message: str) -> str:
    """Return llguidance's message in one line, without the state of its parser and our own
    settings."""
    lines = [line for line in message.split("\n<state>")[0].split("\n") if SETTING not in line]
    return " ".join(" ".join(lines).split())[:200]


def _refused(kind: str, reason: str) -> InputError:
    remedy = "" if ";" in reason else "; correct it"
    return InputError(f"structured's {kind} cannot be followed: {reason}{remedy}")
