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
from foretoken.text.decoding import REPLACEMENT_CHARACTER, decode
from foretoken.text.json_schema import rewrite_schema

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

# Between JSON's tokens: blanks cost tokens, and where JSON allows any, weak models never end
JSON_SEPARATORS = {
    "whitespace_flexible": False,
    "key_separator": ":[ ]?",
    "item_separator": ",[ ]?",
}
NO_FORCING = '%llguidance {"no_forcing": true}'
MAX_CACHED_GRAMMARS = 32  # grammars kept compiled per vocabulary
MAX_CACHED_VOCABULARIES = 16  # per tokenizer: one for each set of EOS ids
MAX_CHECKED_TOKENS = 256  # tokens whose spelling is compared


class GrammarVocabulary:
    """A tokenizer as llguidance knows it, over V ids of which `ends` end a text.

    llguidance's form takes a second to make and has one EOS token, so all vocabularies of a
    tokenizer share the form with the model's `model_eos` first EOS token."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        V: int,
        eos: frozenset[int],
        model_eos: frozenset[int],
        lexicons: SharedCache[LLTokenizer],
    ) -> None:
        self.V = V
        self.eos_ids = sorted(id for id in eos if id < V)
        if not self.eos_ids:
            raise InputError(
                "structured output ends with an EOS token and the model names none; set "
                "eos_token_id in its generation config"
            )
        end = min((id for id in model_eos if id < min(V, len(tokenizer))), default=self.eos_ids[0])
        self.lexicon = lexicons.get((end, len(tokenizer)), _build_lexicon, tokenizer, end)
        self.forbidden_ids = [] if end in self.eos_ids else [end]  # EOS to llguidance alone
        self._grammars: SharedCache[CompiledGrammar] = SharedCache(MAX_CACHED_GRAMMARS)

    def compile_grammar(self, structured: Structured) -> CompiledGrammar:
        """Compile a row's wish. InputError where it does not compile or cannot be followed from its
        first tokens on."""
        return self._grammars.get(structured, self._compile, structured)

    def _compile(self, structured: Structured) -> CompiledGrammar:
        return CompiledGrammar(self, structured.kind, _compile_matcher(structured, self.lexicon))


def get_vocabulary(
    tokenizer: PreTrainedTokenizerBase | None,
    V: int,
    eos: frozenset[int],
    model_eos: frozenset[int] = frozenset(),
) -> GrammarVocabulary:
    """Return the vocabulary of a fast tokenizer, V being the rows of the output layer, `eos` the
    request's EOS ids and `model_eos` those of the model's configuration; cached as long as the
    tokenizer lives. InputError if llguidance is missing or cannot take the tokenizer."""
    if tokenizer is None or not getattr(tokenizer, "is_fast", False):
        raise InputError(
            "structured output needs a fast tokenizer of transformers, not "
            f"{type(tokenizer).__name__}; give one as tokenizer="
        )
    caches: _VocabularyCaches = (
        SharedCache(MAX_CACHED_VOCABULARIES),
        SharedCache(MAX_CACHED_VOCABULARIES),
    )
    vocabularies, lexicons = _VOCABULARIES.setdefault(tokenizer, caches)
    key = (V, eos, model_eos, len(tokenizer))  # tokens may be added to a tokenizer
    return vocabularies.get(key, GrammarVocabulary, tokenizer, V, eos, model_eos, lexicons)


_VocabularyCaches = tuple[SharedCache[GrammarVocabulary], "SharedCache[LLTokenizer]"]
_VOCABULARIES: WeakKeyDictionary[PreTrainedTokenizerBase, _VocabularyCaches] = WeakKeyDictionary()


class CompiledGrammar:
    """A grammar compiled over a vocabulary, of which every row takes a matcher."""

    def __init__(self, vocabulary: GrammarVocabulary, kind: str, compiled: LLMatcher) -> None:
        self.vocabulary = vocabulary
        self.kind = kind
        self._compiled = compiled
        self._require_texts()

    def new_matcher(self) -> GrammarMatcher:
        """A matcher before its first token."""
        return GrammarMatcher(self)

    def copy_matcher(self, tokens: list[int]) -> LLMatcher:
        """llguidance's own matcher behind `tokens`, which it allows."""
        state = self._compiled.deep_copy()
        state.consume_tokens(tokens)
        return state

    def _require_texts(self) -> None:
        """InputError where no token can begin a text, or none goes on where its forced beginning
        ends. A failure further on is found when a text gets there."""
        first = self.new_matcher()
        for token in first.find_forced_tokens():
            first.push(token)
        if not first.compute_mask().any():
            raise _make_error(self.kind, "no text of this vocabulary satisfies it")


class GrammarMatcher:
    """One row's place in its grammar.

    Live at first; *ended* behind an EOS token where the text may end; *dead* behind a token that
    the grammar does not allow, and behind anything that follows an end. `pop` undoes each of them.
    """

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._compile = grammar
        self._vocabulary = grammar.vocabulary
        self._state = grammar.copy_matcher([])
        self._tokens: list[int] = []  # what it consumed; EOS and what is not allowed stay outside
        self._num_tokens_after_end = 0  # tokens since it is live no longer
        self._ended_by_eos = False  # whether the first of them was an end
        self._forced: list[int] | None = None  # behind the last token, once it was asked for

    @property
    def ended(self) -> bool:
        return self._num_tokens_after_end == 1 and self._ended_by_eos

    @property
    def dead(self) -> bool:
        return self._num_tokens_after_end > 0 and not self.ended

    def push(self, token: int) -> None:
        """Go on by any token."""
        self._forced = None
        if self._num_tokens_after_end:
            self._num_tokens_after_end += 1
        elif token in self._vocabulary.eos_ids:
            self._num_tokens_after_end, self._ended_by_eos = 1, self._state.is_accepting()
        elif token not in self._vocabulary.forbidden_ids and self._state.try_consume_tokens(
            [token]
        ):
            self._tokens.append(token)
        else:
            self._num_tokens_after_end, self._ended_by_eos = 1, False

    def pop(self) -> None:
        """Undo the last push that was not undone; IndexError where there is none."""
        self._forced = None
        if self._num_tokens_after_end:
            self._num_tokens_after_end -= 1
        else:
            self._tokens.pop()
            self._state.rollback(1)
        if self._state.is_error():  # it never recovers, and some Lark grammars cannot go back
            self._state = self._compile.copy_matcher(self._tokens)

    def compute_mask(self) -> Tensor:
        """The tokens that may come next, bool `[V]` on the CPU; none unless it is live."""
        V, ends = self._vocabulary.V, self._vocabulary.eos_ids
        if self._num_tokens_after_end:
            return torch.zeros(V, dtype=torch.bool)
        bits = np.frombuffer(self._state.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, count=V, bitorder="little").view(np.bool_)
        mask[ends] = self._state.is_accepting()
        mask[self._vocabulary.forbidden_ids] = False
        return torch.from_numpy(mask)

    def __call__(self, scores: Tensor) -> Tensor:
        """`scores [V]` on any device with -inf for what is not allowed; as they are behind an end,
        where nothing is kept. ControlError where no token is allowed."""
        if self.ended:
            return scores
        mask = self.compute_mask()
        if not mask.numpy().any():  # 30 times as fast as torch's at V = 128,000
            raise ControlError(self._explain_empty_mask()).about("structured")
        return torch.where(mask.to(scores.device), scores, -math.inf)

    def find_forced_tokens(self) -> list[int]:
        """The tokenizer's spelling of the text that must follow, if any. They are draft tokens:
        other tokens spell that text too, and its last token may go on."""
        if self._forced is None:
            self._forced = [] if self._num_tokens_after_end else self._tokenize_forced_text()
        return list(self._forced)

    def _tokenize_forced_text(self) -> list[int]:
        tokens = self._vocabulary.lexicon.tokenize_bytes(self._state.compute_ff_bytes())
        tokens = tokens[: self._state.validate_tokens(tokens)]  # a normalizer may change the text
        V, ends = self._vocabulary.V, self._vocabulary.eos_ids
        return list(takewhile(lambda token: token < V and token not in ends, tokens))

    def _explain_empty_mask(self) -> str:
        """Why no token is allowed."""
        name = f"structured output's {self._compile.kind}"
        if self._num_tokens_after_end:
            return f"{name} is left by the text; draw tokens that it allows"
        reason = _clean_message(self._state.get_error())
        if not reason or reason.startswith("NoExtension"):
            reason = "no token continues the text"
        return f"{name} cannot be followed after {len(self._tokens)} tokens: {reason}; correct it"


def _import_llguidance():  # not annotated: the type is the module's
    """Import llguidance, late as it is an extra; InputError where it is missing."""
    try:
        import llguidance
    except ImportError:
        raise InputError(
            "structured output needs llguidance; pip install 'foretoken[grammar]'"
        ) from None
    return llguidance


def _build_lexicon(tokenizer: Any, end: int) -> LLTokenizer:
    """llguidance's form of a fast tokenizer."""
    llguidance = _import_llguidance()
    if end >= len(tokenizer):
        raise InputError(
            f"structured output ends with an EOS token and this tokenizer has none of id {end}; "
            "set eos_token_id in the model's generation config"
        )
    try:
        lexicon = llguidance.LLTokenizer(serialize_tokenizer(tokenizer), eos_token=end)
    except ValueError as error:
        raise InputError(
            f"structured output cannot read this tokenizer: {to_one_line(error)}; leave "
            "structured out"
        ) from None
    _require_spelling(lexicon, tokenizer)
    return lexicon


def serialize_tokenizer(tokenizer: Any) -> str:
    """A fast tokenizer as llguidance reads it."""
    serialized = json.loads(tokenizer.backend_tokenizer.to_str())
    serialized |= {
        "padding": None,
        "truncation": None,
        "decoder": _convert_decoder(serialized["decoder"]),
    }
    return json.dumps(serialized)


def _convert_decoder(decoder: dict[str, Any] | None) -> dict[str, Any] | None:
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
    ids = [id for id in range(lexicon.vocab_size) if not lexicon.is_special_token(id)]
    letter = next((id for id in ids if lexicon.decode_bytes([id]).isalnum()), None)
    if letter is None:
        return
    for token in ids[:: -(-len(ids) // MAX_CHECKED_TOKENS)]:
        spelled = lexicon.decode_bytes([letter, token]).decode(errors="replace")
        decoded = decode(tokenizer, [letter, token])
        if REPLACEMENT_CHARACTER not in spelled and spelled != decoded:
            raise InputError(
                f"structured output cannot read this tokenizer: its token {token} decodes to "
                f"{decoded[1:]!r}, not {spelled[1:]!r}; leave structured out"
            )


def _compile_matcher(structured: Structured, lexicon: LLTokenizer) -> LLMatcher:
    """InputError where it does not compile."""
    compiled = _import_llguidance().LLMatcher(lexicon, to_llguidance(structured), log_level=0)
    if compiled.is_error():
        raise _make_error(structured.kind, _clean_message(compiled.get_error()))
    return compiled


def find_schema_problem(schema: Any) -> str | None:
    """Say why no text can be held to a JSON schema, or None."""
    matcher = _import_llguidance().LLMatcher
    return (
        _clean_message(matcher.validate_grammar(to_llguidance(Structured("json_schema", schema))))
        or None
    )


def to_llguidance(structured: Structured) -> str:
    """A wish in llguidance's own language; InputError where it is not what its kind says."""
    kind, text = structured
    try:
        return json.dumps({"grammars": _build_grammars(kind, text)})
    except (ValueError, RecursionError) as error:
        raise _make_error(kind, to_one_line(error)) from None


def _build_grammars(kind: str, text: str) -> list[dict[str, Any]]:
    """Return the grammars that llguidance compiles: the first is the one that a text follows.
    ValueError where a grammar's text is not what its kind says."""
    if kind == "json_schema":
        schema = rewrite_schema(json.loads(text), JSON_SEPARATORS)
        return [_build_lark("start: @schema"), {"name": "schema", "json_schema": schema}]
    if kind == "regex":
        escaped = json.loads(_import_llguidance().LLMatcher.grammar_from_regex(text))["grammars"][0]
        return [_build_lark(escaped["lark_grammar"])]
    if kind == "lark":
        return [_build_lark(text)]
    choice = json.loads(text)
    if not isinstance(choice, list) or not choice or not all(isinstance(x, str) for x in choice):
        raise ValueError("it is not a JSON list of strings")
    return [_build_lark(f"start: {' | '.join(map(json.dumps, choice))}")]


def build_symbol(structured: Structured) -> str:
    """A grammar as a symbol of another one, in Lark. InputError where it is not what its kind
    says."""
    kind, text = structured
    try:
        grammars = _build_grammars(kind, text)
    except (ValueError, RecursionError) as error:
        raise _make_error(kind, to_one_line(error)) from None
    if kind == "json_schema":
        return f"%json {json.dumps(grammars[1]['json_schema'])}"
    return f"%lark {{\n{grammars[0]['lark_grammar'].removesuffix(NO_FORCING)}}}"


def _build_lark(text: str) -> dict[str, Any]:
    """A Lark grammar whose masks hold every token that goes on. Where only one text can follow,
    they would hold one token otherwise: what the tokenizer makes of that text, which may even spell
    another one, or have no row in the output layer."""
    return {"lark_grammar": f"{text}\n{NO_FORCING}"}


def _clean_message(message: str) -> str:
    """Return llguidance's message in one line, without the state of its parser and our own
    settings."""
    lines = [line for line in message.split("\n<state>")[0].split("\n") if NO_FORCING not in line]
    return " ".join(" ".join(lines).split())[:200]


def _make_error(kind: str, reason: str) -> InputError:
    remedy = "" if ";" in reason else "; correct it"
    return InputError(f"structured's {kind} cannot be followed: {reason}{remedy}")
