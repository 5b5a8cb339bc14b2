"""Structured output: allow only the tokens that continue a match of a JSON schema, regex, Lark
grammar or choice.

llguidance (the extra `grammar`) compiles grammars and computes the allowed tokens. This module adds
support for several EOS ids (llguidance supports one), and rollback from any state, even after
tokens that are not allowed. Every tokenization of a matching string is allowed. Tokens are decoded
as if other tokens preceded them, because SentencePiece's decoders drop a space at the beginning.
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

# whitespace in JSON costs tokens, and weak models generate it forever if any amount is allowed
JSON_SEPARATORS = {
    "whitespace_flexible": False,
    "key_separator": ":[ ]?",
    "item_separator": ",[ ]?",
}
NO_FORCING = '%llguidance {"no_forcing": true}'
MAX_CACHED_GRAMMARS = 32  # compiled, per vocabulary
MAX_CACHED_VOCABULARIES = 16  # per tokenizer: one for each set of EOS ids
MAX_CHECKED_TOKENS = 256  # tokens for which llguidance's and the tokenizer's decoding is compared


class GrammarVocabulary:
    """The vocabulary that grammars are compiled for: a tokenizer's tokens with ids below V, and the
    ids that end an output, `eos`.

    All vocabularies of one tokenizer share llguidance's tokenizer, which takes a second to build.
    llguidance's tokenizer has a single EOS token, the lowest id of `model_eos`.
    """

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
                "structured output ends with an EOS token, but the model has none; set "
                "eos_token_id in the model's generation config"
            )
        end = min((id for id in model_eos if id < min(V, len(tokenizer))), default=self.eos_ids[0])
        self.lexicon = lexicons.get((end, len(tokenizer)), _build_lexicon, tokenizer, end)
        self.forbidden_ids = [] if end in self.eos_ids else [end]  # it is EOS for llguidance only
        self._grammars: SharedCache[CompiledGrammar] = SharedCache(MAX_CACHED_GRAMMARS)

    def compile_grammar(self, structured: Structured) -> CompiledGrammar:
        """Return the compiled grammar, from a cache. Raises InputError if the grammar does not
        compile or no token can begin a match."""
        return self._grammars.get(structured, self._compile, structured)

    def _compile(self, structured: Structured) -> CompiledGrammar:
        return CompiledGrammar(self, structured.kind, _compile_matcher(structured, self.lexicon))


def get_vocabulary(
    tokenizer: PreTrainedTokenizerBase | None,
    V: int,
    eos: frozenset[int],
    model_eos: frozenset[int] = frozenset(),
) -> GrammarVocabulary:
    """Return the vocabulary of a fast tokenizer, cached as long as the tokenizer exists. V: the
    size of the output layer; eos: the request's EOS ids; model_eos: EOS ids of the model's config.
    Raises InputError if llguidance is missing or does not support the tokenizer."""
    if tokenizer is None or not getattr(tokenizer, "is_fast", False):
        raise InputError(
            "structured output needs a fast tokenizer of transformers, not "
            f"{type(tokenizer).__name__}; give a fast tokenizer as tokenizer="
        )
    caches: _VocabularyCaches = (
        SharedCache(MAX_CACHED_VOCABULARIES),
        SharedCache(MAX_CACHED_VOCABULARIES),
    )
    vocabularies, lexicons = _VOCABULARIES.setdefault(tokenizer, caches)
    key = (V, eos, model_eos, len(tokenizer))  # the length, because users may add tokens
    return vocabularies.get(key, GrammarVocabulary, tokenizer, V, eos, model_eos, lexicons)


_VocabularyCaches = tuple[SharedCache[GrammarVocabulary], "SharedCache[LLTokenizer]"]
_VOCABULARIES: WeakKeyDictionary[PreTrainedTokenizerBase, _VocabularyCaches] = WeakKeyDictionary()


class CompiledGrammar:
    """A grammar compiled for a vocabulary. `make_matcher` creates the matcher of one sequence."""

    def __init__(self, vocabulary: GrammarVocabulary, kind: str, compiled: LLMatcher) -> None:
        self.vocabulary = vocabulary
        self.kind = kind
        self._compiled = compiled
        self._require_match()

    def make_matcher(self) -> GrammarMatcher:
        """Return a new matcher in the state before the first token of an output."""
        return GrammarMatcher(self)

    def copy_matcher(self, tokens: list[int]) -> LLMatcher:
        """Return a new llguidance matcher in the state after `tokens`, which must be allowed."""
        state = self._compiled.deep_copy()
        state.consume_tokens(tokens)
        return state

    def _require_match(self) -> None:
        """Raise InputError if no token can begin a match, or if no token can follow the forced
        beginning of a match. Later dead ends are found during generation."""
        first = self.make_matcher()
        for token in first.find_forced_tokens():
            first.push(token)
        if not first.compute_mask().any():
            raise _make_error(self.kind, "no tokens of this vocabulary match it")


class GrammarMatcher:
    """The state of a grammar after the tokens of one sequence.

    A matcher is *live* at first. After an EOS token, the matcher is *ended* if the output may end
    there. After a token that the grammar does not allow, or any token after the end, the matcher is
    *dead*. `pop` restores the state before the last token.
    """

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._state = grammar.copy_matcher([])
        self._tokens: list[int] = []  # consumed while live: allowed tokens without EOS
        self._num_tokens_after_end = 0  # tokens pushed since the matcher was live
        self._ended_by_eos = False  # whether the first of these tokens was a valid EOS
        self._forced: list[int] | None = None  # cached result of `find_forced_tokens`

    @property
    def ended(self) -> bool:
        return self._num_tokens_after_end == 1 and self._ended_by_eos

    @property
    def dead(self) -> bool:
        return self._num_tokens_after_end > 0 and not self.ended

    def push(self, token: int) -> None:
        """Append a token, even one that the grammar does not allow."""
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
        """Remove the last token. Raises IndexError if there is none."""
        self._forced = None
        if self._num_tokens_after_end:
            self._num_tokens_after_end -= 1
        else:
            self._tokens.pop()
            self._state.rollback(1)
        # llguidance does not recover from errors, and cannot roll back some Lark grammars
        if self._state.is_error():
            self._state = self._grammar.copy_matcher(self._tokens)

    def compute_mask(self) -> Tensor:
        """Return a mask of the tokens that may come next, bool `[V]` on the CPU. All entries are
        False unless the matcher is live."""
        V, ends = self._vocabulary.V, self._vocabulary.eos_ids
        if self._num_tokens_after_end:
            return torch.zeros(V, dtype=torch.bool)
        bits = np.frombuffer(self._state.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, count=V, bitorder="little").view(np.bool_)
        mask[ends] = self._state.is_accepting()
        mask[self._vocabulary.forbidden_ids] = False
        return torch.from_numpy(mask)

    def __call__(self, scores: Tensor) -> Tensor:
        """Return `scores [V]`, on any device, with -inf for tokens that are not allowed. After the
        end of the output, the scores are unchanged, because later tokens are cut off. Raises
        ControlError if no token is allowed."""
        if self.ended:
            return scores
        mask = self.compute_mask()
        if not mask.numpy().any():  # 30 times as fast as torch's any at V = 128,000
            raise ControlError(self._explain_empty_mask()).with_option("structured")
        return torch.where(mask.to(scores.device), scores, -math.inf)

    def find_forced_tokens(self) -> list[int]:
        """Return a tokenization of the string that the grammar forces next; [] if no string is
        forced. Use these tokens as draft tokens only: other tokens may decode to the same string,
        and the last token may extend beyond the string."""
        if self._forced is None:
            self._forced = [] if self._num_tokens_after_end else self._tokenize_forced_text()
        return list(self._forced)

    def _tokenize_forced_text(self) -> list[int]:
        tokens = self._vocabulary.lexicon.tokenize_bytes(self._state.compute_ff_bytes())
        tokens = tokens[: self._state.validate_tokens(tokens)]  # a normalizer may change the string
        V, ends = self._vocabulary.V, self._vocabulary.eos_ids
        return list(takewhile(lambda token: token < V and token not in ends, tokens))

    def _explain_empty_mask(self) -> str:
        name = f"structured output's {self._grammar.kind}"
        if self._num_tokens_after_end:
            return f"{name} does not match the output; sample only tokens that the grammar allows"
        reason = _clean_message(self._state.get_error())
        if not reason or reason.startswith("NoExtension"):
            reason = "no token continues the output"
        return f"{name} cannot be followed after {len(self._tokens)} tokens: {reason}; correct it"


def _import_llguidance():  # not annotated: the type is the module's
    """Return the module llguidance, imported late. Raises InputError if this extra is missing."""
    try:
        import llguidance
    except ImportError:
        raise InputError(
            "structured output needs llguidance; pip install 'foretoken[grammar]'"
        ) from None
    return llguidance


def _build_lexicon(tokenizer: Any, end: int) -> LLTokenizer:
    """Return llguidance's tokenizer for a fast tokenizer. Raises InputError if llguidance fails."""
    llguidance = _import_llguidance()
    if end >= len(tokenizer):
        raise InputError(
            f"structured output ends with an EOS token, but this tokenizer has no id {end}; "
            "correct eos_token_id in the model's generation config"
        )
    try:
        lexicon = llguidance.LLTokenizer(serialize_tokenizer(tokenizer), eos_token=end)
    except ValueError as error:
        raise InputError(
            f"structured output does not support this tokenizer: {to_one_line(error)}; leave "
            "out structured"
        ) from None
    _require_spelling(lexicon, tokenizer)
    return lexicon


def serialize_tokenizer(tokenizer: Any) -> str:
    """Return a fast tokenizer as the JSON that llguidance takes."""
    serialized = json.loads(tokenizer.backend_tokenizer.to_str())
    serialized |= {
        "padding": None,
        "truncation": None,
        "decoder": _convert_decoder(serialized["decoder"]),
    }
    return json.dumps(serialized)


def _convert_decoder(decoder: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a tokenizer's decoder without Metaspace, which llguidance ignores. The replacement of
    Metaspace decodes to the same string except at the beginning of an output."""
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
    """Raise InputError if llguidance and the tokenizer decode one of a sample of tokens
    differently. Each token is decoded after a letter, as decoders may treat the beginning of a
    string differently."""
    ids = [id for id in range(lexicon.vocab_size) if not lexicon.is_special_token(id)]
    letter = next((id for id in ids if lexicon.decode_bytes([id]).isalnum()), None)
    if letter is None:
        return
    for token in ids[:: -(-len(ids) // MAX_CHECKED_TOKENS)]:
        spelled = lexicon.decode_bytes([letter, token]).decode(errors="replace")
        decoded = decode(tokenizer, [letter, token])
        if REPLACEMENT_CHARACTER not in spelled and spelled != decoded:
            raise InputError(
                f"structured output does not support this tokenizer: it decodes token {token} to "
                f"{decoded[1:]!r}, llguidance decodes it to {spelled[1:]!r}; leave out structured"
            )


def _compile_matcher(structured: Structured, lexicon: LLTokenizer) -> LLMatcher:
    """Return llguidance's compiled grammar. Raises InputError if the grammar does not compile."""
    compiled = _import_llguidance().LLMatcher(lexicon, to_llguidance(structured), log_level=0)
    if compiled.is_error():
        raise _make_error(structured.kind, _clean_message(compiled.get_error()))
    return compiled


def find_schema_problem(schema: Any) -> str | None:
    """Return why llguidance does not support a JSON schema; None if the schema is supported."""
    matcher = _import_llguidance().LLMatcher
    return (
        _clean_message(matcher.validate_grammar(to_llguidance(Structured("json_schema", schema))))
        or None
    )


def to_llguidance(structured: Structured) -> str:
    """Return a grammar in llguidance's JSON format. Raises InputError if the source is not a valid
    JSON schema, regex or list of choices."""
    kind, text = structured
    try:
        return json.dumps({"grammars": _build_grammars(kind, text)})
    except (ValueError, RecursionError) as error:
        raise _make_error(kind, to_one_line(error)) from None


def _build_grammars(kind: str, text: str) -> list[dict[str, Any]]:
    """Return the grammars for llguidance to compile. The output must match the first grammar, which
    may refer to the other grammars. Raises ValueError if `text` is not a valid grammar."""
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
    """Return a grammar as a symbol to use in another Lark grammar. Raises InputError as
    `to_llguidance` does."""
    kind, text = structured
    try:
        grammars = _build_grammars(kind, text)
    except (ValueError, RecursionError) as error:
        raise _make_error(kind, to_one_line(error)) from None
    if kind == "json_schema":
        return f"%json {json.dumps(grammars[1]['json_schema'])}"
    return f"%lark {{\n{grammars[0]['lark_grammar'].removesuffix(NO_FORCING)}}}"


def _build_lark(text: str) -> dict[str, Any]:
    """Return a Lark grammar whose masks contain every token that continues a match. Without
    `no_forcing`, if only one string can follow, a mask would contain only the first token of that
    string's tokenization, which may even decode to another string or be missing in the output
    layer."""
    return {"lark_grammar": f"{text}\n{NO_FORCING}"}


def _clean_message(message: str) -> str:
    """Return llguidance's message in one line, without the parser state and `NO_FORCING`."""
    lines = [line for line in message.split("\n<state>")[0].split("\n") if NO_FORCING not in line]
    return " ".join(" ".join(lines).split())[:200]


def _make_error(kind: str, reason: str) -> InputError:
    remedy = "" if ";" in reason else "; correct it"
    return InputError(f"structured's {kind} cannot be followed: {reason}{remedy}")
