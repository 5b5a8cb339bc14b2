"""The self-check: a test that a family is exact over our cache, made before the model is used.

A small random copy of the model (same class and structure, few layers, windows of 8 tokens) goes
through ragged blocks, rollbacks, joins and leaves, and every logit is compared with a full forward
of the stock model on that row alone. It does not know the real weights: it tests the family's code,
not the model.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.errors import RefusedError, kind_of
from foretoken.media.inputs import ENCODED, Media
from foretoken.models.base import Model
from foretoken.models.row_slots import list_remaining_rows
from foretoken.models.stock import cache, media
from foretoken.models.stock.attention import twin
from foretoken.models.stock.media import encoder_input, made_up, random_states, writer
from foretoken.models.stock.model import CausalModel, Seq2SeqModel
from foretoken.models.stock.sizes import reads_ids, switch_of
from foretoken.models.stock.small_copy import CONTEXT, VOCABULARY, WINDOW, small_copy, thresholds

TOLERANCE = 1e-4  # of the spread of the logits, in float32


class Whole(Protocol):
    """Logits `[need, V]` of the last tokens of a text `[1, n]` that is read by itself, by the stock
    model; `source` `[1, m]` is for the encoder."""

    def __call__(
        self, model: PreTrainedModel, text: Tensor, source: Tensor | None, need: int
    ) -> Tensor: ...


def forward(model: PreTrainedModel, text: Tensor, source: Tensor | None, need: int) -> Tensor:
    """A `Whole`: one forward of the stock model."""
    ids: Any = {"input_ids": text}
    if source is not None:
        ids = {**encoder_input(model, source), "decoder_input_ids": text}
    return model(**ids, use_cache=False, return_dict=True).logits[0, -need:]


@dataclass(frozen=True, slots=True)
class Form:
    """A way to run a model, and its name in an error."""

    name: str
    run: Callable[[PreTrainedModel], Model]
    switches: bool = False  # it also runs texts that a model reads in another way
    instead: str = ""  # what to do where a family fails in it; "": another form is tried
    admit: Callable[[PreTrainedModel], None] = cache.admit  # raises RefusedError
    whole: Whole = forward  # what its logits are compared with
    costs: str = ""  # what it costs beside the others


def on_torch(model: PreTrainedModel) -> Model:
    encodes = writer(model).config.is_encoder_decoder
    return (Seq2SeqModel if encodes else CausalModel)(model)


ON_TORCH = Form(
    "a ragged cache",
    on_torch,
    switches=True,
    instead=cache.INSTEAD,
    admit=partial(cache.admit, states=True),
)


class Unfinished(RefusedError):
    """A check that broke off, by an error in the family's code or for lack of memory. It is not
    remembered: the next one may end otherwise."""


class UnbuiltError(Unfinished):
    """No small copy can be built, and there are no weights to check instead."""


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of a self-check that passed."""

    name: str  # class
    delta: float  # largest |delta logit| over the spread of the logits
    seconds: float
    remembered: bool  # from an earlier run
    itself: bool = False  # made on the model, as no small copy can be built


def check(model: PreTrainedModel, form: Form = ON_TORCH) -> Check:
    """The self-check itself, whatever is remembered. Where no small copy can be built, the model
    is checked itself, if it has its weights, in float32."""
    form.admit(model)
    start, name = time.perf_counter(), f"{model.config.model_type} ({type(model).__name__})"
    itself = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            small = small_copy(type(model), model.config, switch_for(model, form))
        except Exception as error:  # its config may be made in any way
            if model.device.type == "meta" or model.dtype != torch.float32:
                kind = kind_of(error)
                reason = f"cannot be checked: no small copy can be built, its code raised {kind}"
                raise UnbuiltError(_told(name, reason, form)) from error
            small, itself = twin(model), True
    try:
        runner = form.run(small)
        delta = max(deviation(small, runner, form.whole), media_deviation(small, runner))
        apart = contradiction(small, form.whole)
    except RefusedError:
        raise
    except Exception as error:  # an unknown forward raises anything
        reason = f"does not run over {form.name}: its code raised {kind_of(error)}"
        raise Unfinished(_told(name, reason, form)) from error
    if not delta < TOLERANCE:
        difference = f"logits differ by {delta:.1e} of their spread from a full forward"
        raise RefusedError(_told(name, f"is not exact over {form.name}: {difference}", form))
    if not apart < TOLERANCE:
        windowed = thresholds(model.config.get_text_config(decoder=True))
        where, remedy = "", cache.INSTEAD
        if windowed:
            where = "behind its window "
            remedy = "use a configuration whose window is the whole context"
        raise RefusedError(
            f"{name} contradicts itself: {where}transformers' generate differs from its own "
            f"forward of the whole text by {apart:.1e} of their spread, and no text is the right "
            f"one; {remedy}"
        )
    return Check(type(model).__name__, delta, time.perf_counter() - start, False, itself)


def _told(name: str, reason: str, form: Form) -> str:
    return f"{name} {reason}" + (f"; {form.instead}" if form.instead else "")


def deviation(model: PreTrainedModel, runner: Model | None = None, whole: Whole = forward) -> float:
    """Largest |delta logit| over the spread of the logits, of ragged batches against the stock
    model on each row alone, read whole.

    `runner` runs the batches; None: on torch. Rows join, grow by ragged blocks, go back, change
    places and leave, past windows of `WINDOW` tokens and the cache's first capacity.
    """
    rows = CheckedRows(model.eval(), random.Random(0), runner, whole)
    rows.start([cache.BUCKET - 4, 3, 11])
    for width in (1, 5, 0, 12):
        rows.score(width)
    rows.start([0, 6])
    for width in (4, 9):
        rows.score(width)
    rows.leave([1])
    rows.score(5)
    rows.permute([2, 0, 0, 3])
    for width in (3, 1, 1):
        rows.score(width)
    rows.leave([0, 1, 2, 3])
    rows.start([3])  # alone: nothing is padded, and an encoder has no mask
    rows.score(2)
    return rows.worst / rows.spread


def media_deviation(model: PreTrainedModel, runner: Model) -> float:
    """The same against the stock model's `generate`, of inputs of an encoder that can be made up;
    those of other families are tried when the first come."""
    if not runner.capabilities.media or not (inputs := made_up(model)):
        return 0.0
    runner.permute([])  # no rows are left
    return media.deviation(model, runner, Media([], inputs))


def contradiction(model: PreTrainedModel, whole: Whole = forward) -> float:
    """Largest |delta logit| over their spread between `generate`, which caches, and the text that
    it makes read whole, past windows of `WINDOW` tokens and across the length at which the model
    reads a text in another way."""
    if model.config.is_encoder_decoder:  # such a text begins with one token
        return _contradiction(model, 1, 3 * WINDOW, whole)
    switch = switch_of(model)
    starts = [3 * WINDOW] if switch is None else [3 * WINDOW, switch - 1]
    return max(_contradiction(model, start, 4, whole) for start in starts)


@torch.inference_mode()
def _contradiction(model: PreTrainedModel, start: int, new: int, whole: Whole) -> float:
    """The same of `new` tokens of a text that begins with `start`."""
    dice = random.Random(1)
    ids = [[dice.randrange(2, VOCABULARY) for _ in range(start)]]
    text, source, given = torch.tensor(ids, device=model.device), None, dict[str, Any]()
    if model.config.is_encoder_decoder:
        source = torch.arange(2, 4 + 2 * WINDOW, device=model.device)[None]
        given = encoder_input(model, source)
    made = media.generated(model, text, given, new, own=ENCODED not in given)
    worst, spread = 0.0, 1e-9
    for i, cached in enumerate(made.logits):  # each by the text up to it: factors follow its length
        full = whole(model, made.sequences[:, : start + i], source, 1)[0]
        worst = max(worst, float((cached[0] - full).abs().max().nan_to_num(float("inf"))))
        spread = max(spread, float(full.max() - full.min()))
    return worst / spread


class CheckedRows:
    """Random operations on a model's rows; its logits are compared with the stock model's."""

    def __init__(
        self,
        model: PreTrainedModel,
        dice: random.Random,
        runner: Model | None = None,
        whole: Whole = forward,
    ) -> None:
        self.model, self.dice, self.whole = model, dice, whole
        self.runner = runner or on_torch(model)
        self.ids = min(self.runner.vocab_size, VOCABULARY)
        self.source_length = 10 if made_up(model) else 0  # states, always as many; 0: any number
        self.texts: list[list[int]] = []
        self.sources: list[list[int]] = []
        self.worst, self.spread = 0.0, 1e-9

    def draw(self, n: int) -> list[int]:
        return [self.dice.randrange(2, self.ids) for _ in range(n)]

    def start(self, lengths: list[int]) -> None:
        texts = [self.draw(n) for n in lengths]
        sources = [self.draw(self.source_length or self.dice.randint(1, 10)) for _ in lengths]
        rows = zip(texts, sources, strict=True)
        for long, group in groupby(rows, lambda row: self.is_long(len(row[0]) + 1)):
            some = list(group)
            self.runner.set_long_context(long)
            self.runner.start([t for t, _ in some], self.heard([s for _, s in some]))
        self.texts, self.sources = self.texts + texts, self.sources + sources

    def heard(self, sources: list[list[int]]) -> list[list[int]] | None:
        """The sources for the runner, or their states, handed to it."""
        if not self.runner.encoder_decoder or reads_ids(self.model):
            return sources if self.runner.encoder_decoder else None
        tensors = [torch.tensor([s], device=self.model.device) for s in sources]
        states = [{ENCODED: random_states(self.model, x)} for x in tensors]
        reader: Any = self.runner
        reader.joining_media = [Media([], each) for each in states]
        return [[] for _ in sources]

    def score(self, width: int) -> None:
        """A block of up to `width` tokens per row, then a rollback of up to `width`."""
        blocks = [self.draw(self.dice.randint(width // 2, width)) for _ in self.texts]
        need = [self.dice.randint(min(1, len(b)), len(b)) for b in blocks]
        self.read_again(blocks)
        logits = self.runner.score(blocks, need)
        self.texts = [text + block for text, block in zip(self.texts, blocks, strict=True)]
        for b, n in enumerate(need):
            if n:
                self.compare(logits[b, :n], self.alone(b, n))
        back = [self.dice.randint(0, min(len(t), width)) for t in self.texts]
        self.texts = [t[: len(t) - n] for t, n in zip(self.texts, back, strict=True)]
        self.runner.set_lengths([len(text) for text in self.texts])

    def is_long(self, length: int) -> bool:
        return self.runner.context is not None and length > self.runner.context

    def read_again(self, blocks: list[list[int]]) -> None:
        """Rows that these blocks take to where a model reads a text in another way join again."""
        if self.runner.max_context == self.runner.context:
            return
        ends = [len(text) + len(block) for text, block in zip(self.texts, blocks, strict=True)]
        rows = enumerate(zip(ends, self.runner.long, blocks, strict=True))
        again = [b for b, (end, long, block) in rows if block and self.is_long(end) != long]
        order = [*list_remaining_rows(len(self.texts), again), *again]
        self.runner.leave(again)
        for b in again:
            self.runner.set_long_context(self.is_long(ends[b]))
            self.runner.start([self.texts[b]])
        self.runner.permute([order.index(b) for b in range(len(order))])

    def compare(self, ours: Tensor, stock: Tensor) -> None:
        difference = (ours - stock).abs().max().nan_to_num(float("inf"))
        self.worst = max(self.worst, float(difference))
        self.spread = max(self.spread, float(stock.max() - stock.min()))

    @torch.inference_mode()
    def alone(self, b: int, n: int) -> Tensor:
        """Logits `[n, V]` of the last tokens of row b by the stock model."""
        text = torch.tensor([self.texts[b]], device=self.model.device)
        source = None
        if self.runner.encoder_decoder:
            source = torch.tensor([self.sources[b]], device=self.model.device)
        return self.whole(self.model, text, source, n)

    def permute(self, rows: list[int]) -> None:
        self.runner.permute(rows)
        self._become(rows)

    def leave(self, rows: list[int]) -> None:
        self.runner.leave(rows)
        self._become(list_remaining_rows(len(self.texts), rows))

    def _become(self, rows: list[int]) -> None:
        self.texts, self.sources = [self.texts[b] for b in rows], [self.sources[b] for b in rows]


def switch_for(model: PreTrainedModel, form: Form) -> int:
    """From which length on a small copy reads texts with the other rotary factors: within the check
    where this form can, else beyond it."""
    return 2 * WINDOW if form.switches and switch_of(model) is not None else CONTEXT
