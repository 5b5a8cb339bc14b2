"""Input processing: prompts and options of a call become requests and fresh rows, checked before a
model runs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from foretoken.controls import own
from foretoken.controls.chain import Matcher, chain
from foretoken.controls.grammar import Grammar, vocabulary
from foretoken.controls.own import require
from foretoken.errors import ForetokenError, InputError, about, shown
from foretoken.generation_config import Ends, forced, resolved
from foretoken.models.base import Model, longest
from foretoken.options import Prompt, Prompts, Seed, as_list, keys_of
from foretoken.request import Request, Row, TextPrediction
from foretoken.sampling.checks import Structured, as_ids
from foretoken.sampling.keys import RowKey
from foretoken.sampling.params import SamplingParams
from foretoken.text import chat
from foretoken.text.decoding import Transcript

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class InputProcessor:
    """The input of one target: prompts and params become requests. `controls`, `predicted output`:
    as a Speculator's."""

    target: Model
    tokenizer: PreTrainedTokenizerBase | None
    ends: Ends
    controls: dict[str, Any]
    predicted_output: Callable[[Request], TextPrediction] | None = None

    def prompts(
        self,
        prompts: Prompts,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Prompt]:
        """Return prompts one by one; messages as the ids that a chat template makes of them."""
        template = chat_template, chat_template_kwargs
        chats = chat.conversations(prompts)
        if chats is not None:
            return [chat.ids(messages, self.tokenizer, *template) for messages in chats]
        if template != (None, None):
            raise InputError(
                "chat_template is given, but the prompts are no messages; leave it out"
            )
        return as_list(prompts)

    def requests(
        self, prompts: list[Prompt], params: SamplingParams | list[SamplingParams], seed: Seed
    ) -> list[Request]:
        """Return the requests of prompts, `num_return_sequences` of each; InputError for one that
        cannot be continued."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        counts = [sampling.num_return_sequences for sampling in each]
        keys = iter(keys_of(seed, counts))
        requests: list[Request] = []
        for i, (prompt, sampling) in enumerate(zip(prompts, each, strict=True)):
            ids = self.ids(prompt, i)
            self._require_fit(ids, i)
            with _naming_prompt(i, count=len(prompts)):
                copies = islice(keys, sampling.num_return_sequences)
                requests += self._requests(ids, sampling, list(copies))
        return requests

    def _requests(
        self, ids: list[int], params: SamplingParams, keys: list[RowKey]
    ) -> list[Request]:
        """Return requests of the same prompt, one for each of the keys."""
        head, source = self.sides(ids)
        context, limit = longest(self.target), params.max_new_tokens
        limit = limit if context is None else min(limit, context - len(head))
        params = resolved(params, self.controls, self.ends, len(head))
        require(params, self.target, self.tokenizer is not None)
        eos = {*(() if params.ignore_eos else self.ends.eos), *params.stop_token_ids}
        if params.stop_strings and self.tokenizer is not None:
            # such tokens may have no text to be found in
            added = self.tokenizer.added_tokens_decoder.items()
            eos |= {token for token, word in added if word.content in params.stop_strings}
        places = forced(params, len(head), limit - 1)
        if params.structured is not None:  # one that does not compile fails here
            with about("structured"):
                self._grammar(params.structured, frozenset(eos))
        return [Request(head, limit, k, frozenset(eos), source, places, params) for k in keys]

    def _require_fit(self, ids: list[int], i: int) -> None:
        """InputError for a prompt that the model cannot hold."""
        apart = self.target.encoder_decoder  # the new tokens stand elsewhere
        reads = self.target.source_context if apart else longest(self.target)
        if reads is not None and len(ids) >= reads + apart:
            raise InputError(
                f"prompt {i} has {len(ids)} tokens, the model holds {reads}; give a shorter prompt"
            )

    def rows(self, requests: list[Request]) -> list[Row]:
        """Fresh rows, with what shapes and ends their texts."""
        return [self._row(number, request) for number, request in enumerate(requests)]

    def _row(self, number: int, request: Request) -> Row:
        row, params = Row.of(request), request.params
        if row.predicted_output is None and self.predicted_output is not None:
            row.predicted_output = self.predicted_output(request)
        row.controls = chain(request, self.target.vocab_size, number, self._matcher(request))
        if params.stop_strings:
            assert self.tokenizer is not None  # `require` has seen to it
            row.endings.append(transcript(request, self.tokenizer))
        row.endings += own.endings(params.stopping, request.prompt)
        return row

    def _matcher(self, request: Request) -> Matcher | None:
        """Return the matcher of the grammar that a text must follow."""
        structured = request.params.structured
        return None if structured is None else self._grammar(structured, request.eos).matcher()

    def _grammar(self, structured: Structured, eos: frozenset[int]) -> Grammar:
        return vocabulary(self.tokenizer, self.target.vocab_size, eos).grammar(structured)

    def sides(self, ids: list[int]) -> tuple[list[int], list[int] | None]:
        """Return the ids that the decoder continues, and those that the encoder reads."""
        if not self.target.encoder_decoder:
            return ids, None
        assert self.ends.decoder_start is not None
        return [self.ends.decoder_start], ids

    @property
    def readable(self) -> int:
        """V of prompts: what the encoder reads has its own vocabulary."""
        return self.target.source_vocab_size or self.target.vocab_size

    def ids(self, prompt: Prompt, i: int = 0) -> list[int]:
        """Return a prompt's ids, special tokens of the tokenizer included; `i`: its number, for
        errors."""
        if len(prompt) == 0:
            raise InputError(f"prompt {i} is empty; give a text or ids to continue")
        if isinstance(prompt, str):
            prompt = self._tokenized(prompt, f"prompt {i}")
            if not prompt:
                raise InputError(f"prompt {i} has no tokens; give a text that has some")
        return _within(prompt, self.readable, f"prompt {i}")

    def prediction(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the new tokens that a caller expects: ids, or a text, which gets no special
        tokens."""
        if isinstance(prompt, str):
            prompt = self._tokenized(prompt, "prediction", special=False)
        ids = as_ids("prediction", prompt)
        return tuple(_within(ids, self.target.vocab_size, "prediction"))

    def _tokenized(self, text: str, name: str, *, special: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(f"{name} is not valid text; give text in UTF-8") from None
        if self.tokenizer is None:
            raise InputError(f"{name} is text, but there is no tokenizer; give token ids")
        encoding = self.tokenizer(text, add_special_tokens=special, verbose=False)
        return cast(list[int], encoding.input_ids)


def transcript(request: Request, tokenizer: PreTrainedTokenizerBase) -> Transcript:
    """Return the reader of a request's new text, up to its stop strings."""
    params, strings = request.params, request.params.stop_strings or ()
    return Transcript(
        tokenizer,
        request.prompt,
        strings,
        include=params.include_stop_string,
        special=not params.skip_special_tokens,
    )


def _within(ids: Iterable[int], V: int, name: str) -> list[int]:
    """Return the ids, all of which are in 0..V-1; InputError otherwise."""
    for token in (ids := list(ids)):
        if not 0 <= token < V:
            raise InputError(f"{name} holds the id {shown(token)}; ids must be in 0..{V - 1}")
    return ids


@contextmanager
def _naming_prompt(i: int, *, count: int) -> Generator[None]:
    """Make an error within say which of several prompts it is about."""
    try:
        yield
    except ForetokenError as error:
        if count == 1:
            raise
        again = type(error)(f"prompt {i}: {error}")
        raise again.about(error.option or "prompt") from None
