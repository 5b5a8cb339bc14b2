"""Finished rows as what transformers' `generate` returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foretoken.models.base import Model
from foretoken.request import Row
from foretoken.sampling.distributions import warped
from foretoken.transformers_integration.generate_call import GenerateCall

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


class StreamedRows:
    """Tokens to a streamer, one at a time, as `generate` puts them; the prompt it has put itself.
    None: to nobody."""

    def __init__(self, streamer: BaseStreamer | None, rows: Sequence[Row]) -> None:
        self.streamer, self.row, self.sent = streamer, rows[0], 0

    def put(self) -> None:
        """Hand the new tokens to the streamer."""
        if self.streamer is not None:
            tokens = self.row.new_tokens[self.sent :]
            for token in tokens:
                self.streamer.put(torch.tensor([token]))
            self.sent += len(tokens)

    def end(self) -> None:
        """Nothing follows."""
        if self.streamer is not None:
            self.streamer.end()


def decoded(
    call: GenerateCall,
    rows: Sequence[Row],
    steps: Iterable[object],
    target: Model,
    streamer: BaseStreamer | None,
) -> Any:
    """Take the steps of a call's rows, and return what `generate` returns. Raises what a row failed
    with."""
    if call.reports:
        for row in rows:
            row.seen = []
    stream = StreamedRows(streamer, rows)
    with call.heard(target):
        for _ in steps:
            stream.put()
    for b, row in enumerate(rows):
        row.require(b)
    stream.end()
    return output(call, rows)


def output(handed: GenerateCall, rows: Sequence[Row]) -> Any:
    """The ids `[B, n]`, padded on the right, or with `return_dict_in_generate` an output of
    transformers'.

    Its scores and logits are float32, one `[B, V]` for each new place; rows that have ended before
    have zeros there. It has no cache, and neither attentions nor hidden states.
    """
    from transformers.generation.utils import (  # late: takes seconds
        GenerateDecoderOnlyOutput,
        GenerateEncoderDecoderOutput,
    )

    config = handed.config
    pad = getattr(config, "_pad_token_tensor", None)
    new = pad_sequence(
        [torch.tensor(row.new_tokens) for row in rows],
        batch_first=True,
        padding_value=0 if pad is None else int(pad),
    )
    sequences: Any = torch.cat([handed.ids, new.to(handed.ids)], 1)
    if not config.return_dict_in_generate:
        return sequences
    kind = GenerateEncoderDecoderOutput if handed.encoder_decoder else GenerateDecoderOnlyOutput
    return kind(
        sequences=sequences,
        scores=_places([_scores(row, handed) for row in rows]) if config.output_scores else None,
        logits=_places([_raw(row) for row in rows]) if config.output_logits else None,
    )


def _places(rows: list[Tensor]) -> Any:
    """From a row's places `[n, V]` to the places' rows `[B, V]`."""
    return pad_sequence(rows, batch_first=True).unbind(1)


def _raw(row: Row) -> Tensor:
    return torch.cat([block.raw for block in row.seen or ()]).float()


def _scores(row: Row, handed: GenerateCall) -> Tensor:
    """Return the scores that transformers' processors would leave of a row's logits."""
    scores = torch.cat([block.shaped for block in row.seen or ()])
    if handed.samples:
        scores = warped(scores, row.request.params.standard)
    return (scores.log_softmax(-1) if handed.config.renormalize_logits else scores).float()
