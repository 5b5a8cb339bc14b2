"""What a call asks for, as requests and fresh rows: everything that is checked before a model
runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from foretoken.controls import own
from foretoken.controls.chain import Matcher, chain
from foretoken.controls.grammar import Grammar
from foretoken.controls.required import require
from foretoken.ends import Ends, resolved
from foretoken.errors import InputError
from foretoken.models.base import Model
from foretoken.options import Prompt, Prompts, Seed, as_list, keys_of
from foretoken.request import Request, Row
from foretoken.sampling.keys import RowKey
from foretoken.sampling.params import SamplingParams
from foretoken.text import chat
from foretoken.text.transcript import Transcript

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Intake:
    """The ways into one target. `controls`: as a Speculator's."""

    target: Model
    tokenizer: PreTrainedTokenizerBase | None
    ends: Ends
    controls: dict[str, Any]

    def prompts(
        self, prompts: Prompts, template: str | None, options: Mapping[str, Any] | None
    ) -> list[Prompt]:
        """Prompts one by one; messages as the ids that a chat template makes of them."""
        chats = chat.conversations(prompts)
        if chats is not None:
            return [chat.ids(messages, self.tokenizer, template, options) for messages in chats]
        if template is not None or options is not None:
            raise InputError(
                "chat_template is given, but the prompts are no messages; leave it out"
            )
        return as_list(prompts)

    def requests(
        self, prompts: list[Prompt], params: SamplingParams | list[SamplingParams], seed: Seed
    ) -> list[Request]:
        """What `generate` makes of its prompts, `num_return_sequences` of each; InputError for one
        that cannot be continued."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        counts = [wishes.num_return_sequences for wishes in each]
        keys = iter(keys_of(seed, counts))
        return [
            self._request(i, prompt, wishes, next(keys))
            for i, (prompt, wishes) in enumerate(zip(prompts, each, strict=True))
            for _ in range(wishes.num_return_sequences)
        ]

    def _request(self, i: int, prompt: Prompt, params: SamplingParams, key: RowKey) -> Request:
        ids = self.ids(prompt, i)
        head, source = self.sides(ids)
        reads = self.target.source_context if source else self.target.context
        if reads is not None and len(ids) >= reads + (source is not None):
            raise InputError(
                f"prompt {i} has {len(ids)} tokens, the model holds {reads}; give a shorter prompt"
            )
        context, limit = self.target.context, params.max_new_tokens
        limit = limit if context is None else min(limit, context - len(head))
        params = resolved(params, self.controls, self.ends, len(head))
        require(params, self.target, self.tokenizer is not None)
        forced: dict[int, int] = {}
        if params.forced_bos_token_id is not None:
            forced[1 - len(head)] = params.forced_bos_token_id  # the decoder's second token
        if params.forced_eos_token_id is not None:
            forced[limit - 1] = params.forced_eos_token_id
        eos = {*(() if params.ignore_eos else self.ends.eos), *params.stop_token_ids}
        if params.stop_strings and self.tokenizer is not None:
            # such tokens may have no text to be found in
            added = self.tokenizer.added_tokens_decoder.items()
            eos |= {token for token, word in added if word.content in params.stop_strings}
        return Request(head, limit, key, frozenset(eos), source, forced, params)

    def rows(self, requests: list[Request]) -> list[Row]:
        """Fresh rows, with what shapes and ends their texts."""
        return [self._row(number, request) for number, request in enumerate(requests)]

    def _row(self, number: int, request: Request) -> Row:
        row, params = Row.of(request), request.params
        row.controls = chain(request, self.target.vocab_size, number, self._matcher(request))
        if params.stop_strings:
            assert self.tokenizer is not None  # `require` has seen to it
            row.endings.append(self.transcript(request))
        row.endings += own.endings(params.stopping, request.prompt)
        return row

    def _matcher(self, request: Request) -> Matcher | None:
        """What follows the grammar that a text must match."""
        if request.params.structured is None:
            return None
        V = self.target.vocab_size
        return Grammar.of(request.params.structured, self.tokenizer, V, request.eos).matcher()

    def transcript(self, request: Request) -> Transcript:
        strings, include = request.params.stop_strings or (), request.params.include_stop_string
        assert self.tokenizer is not None
        return Transcript(self.tokenizer, request.prompt, strings, include=include)

    def sides(self, ids: list[int]) -> tuple[list[int], list[int] | None]:
        """What the decoder continues and what the encoder reads."""
        if not self.target.encoder_decoder:
            return ids, None
        assert self.ends.decoder_start is not None
        return [self.ends.decoder_start], ids

    @property
    def readable(self) -> int:
        """V of prompts: what the encoder reads has its own vocabulary."""
        return self.target.source_vocab_size or self.target.vocab_size

    def ids(self, prompt: Prompt, i: int = 0) -> list[int]:
        """A prompt's ids, special tokens of the tokenizer included; `i`: its number, for errors."""
        if len(prompt) == 0:
            raise InputError(f"prompt {i} is empty; give a text or ids to continue")
        if isinstance(prompt, str):
            try:
                prompt.encode()
            except UnicodeEncodeError:
                raise InputError(f"prompt {i} is not valid text; give text in UTF-8") from None
            if self.tokenizer is None:
                raise InputError(f"prompt {i} is text, but there is no tokenizer; give token ids")
            prompt = cast(list[int], self.tokenizer(prompt, verbose=False).input_ids)
            if not prompt:
                raise InputError(f"prompt {i} has no tokens; give a text that has some")
        V = self.readable
        for token in prompt:
            if not 0 <= token < V:
                raise InputError(f"prompt {i} holds the id {token}; ids must be in 0..{V - 1}")
        return list(prompt)
