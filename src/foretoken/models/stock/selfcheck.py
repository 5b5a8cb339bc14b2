"""The self-check: before a model is used, tests that its family's code is exact over foretoken's
cache.

A small random copy of the model (same class and structure, few layers, windows of 8 tokens) runs
ragged blocks, rollbacks, joins and leaves. All logits are compared with the logits of full forward
passes of the stock model, each over one sequence. This tests the family's code, not the model's
weights.
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

from foretoken.errors import RefusedError, log_error_kind
from foretoken.media.inputs import ENCODER_OUTPUTS, Media
from foretoken.models.base import Model
from foretoken.models.row_slots import list_remaining_rows
from foretoken.models.stock import cache, media
from foretoken.models.stock.attention import make_twin
from foretoken.models.stock.media import (
    get_language_model,
    make_encoder_input,
    make_random_inputs,
    make_random_states,
)
from foretoken.models.stock.model import CausalModel, Seq2SeqModel
from foretoken.models.stock.sizes import get_rope_switch_length, takes_ids
from foretoken.models.stock.small_copy import (
    COPY_CONTEXT,
    COPY_VOCAB_SIZE,
    COPY_WINDOW,
    find_thresholds,
    make_small_copy,
)

LOGIT_TOLERANCE = 1e-4  # relative to the spread of the logits, in float32


class ReferenceForward(Protocol):
    """Computes the stock model's logits `[need, V]` for the last `need` tokens of one sequence `[1,
    n]`, without a cache. `source` `[1, m]` is the encoder's input, for encoder-decoders."""

    def __call__(
        self, model: PreTrainedModel, token_ids: Tensor, source: Tensor | None, need: int
    ) -> Tensor: ...


def run_reference(
    model: PreTrainedModel, token_ids: Tensor, source: Tensor | None, need: int
) -> Tensor:
    """Return the stock model's logits from one forward pass over the sequence; a
    `ReferenceForward`."""
    ids: Any = {"input_ids": token_ids}
    if source is not None:
        ids = {**make_encoder_input(model, source), "decoder_input_ids": token_ids}
    return model(**ids, use_cache=False, return_dict=True).logits[0, -need:]


@dataclass(frozen=True, slots=True)
class CheckedBackend:
    """A backend that the self-check tests.

    Attributes:
        name: The backend's name in error messages.
        build: Returns the backend's Model of a transformers model.
        switches_rope: True if the backend runs sequences beyond the rope switch length.
        remedy: The end of the error message for a family that fails; "" if another backend is then
            tried.
        admit: Raises RefusedError for a model that the backend cannot run.
        reference: Computes the logits that the backend's logits must equal.
        cost_note: The backend's disadvantage compared with others, in words for the user.
    """

    name: str
    build: Callable[[PreTrainedModel], Model]
    switches_rope: bool = False
    remedy: str = ""
    admit: Callable[[PreTrainedModel], None] = cache.admit
    reference: ReferenceForward = run_reference
    cost_note: str = ""


def build_torch_model(model: PreTrainedModel) -> Model:
    is_encoder_decoder = get_language_model(model).config.is_encoder_decoder
    return (Seq2SeqModel if is_encoder_decoder else CausalModel)(model)


TORCH_BACKEND = CheckedBackend(
    "a ragged cache",
    build_torch_model,
    switches_rope=True,
    remedy=cache.ALTERNATIVES_HINT,
    admit=partial(cache.admit, states=True),
)


class UnfinishedCheckError(RefusedError):
    """A self-check stopped at an error in the family's code, or for lack of memory. The result is
    not saved, since the next check may succeed."""


class SmallCopyError(UnfinishedCheckError):
    """No small copy can be built, and there are no float32 weights to check instead."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The outcome of a self-check that passed."""

    name: str  # the model's class
    delta: float  # largest |delta logit| over the spread of the logits
    seconds: float
    from_cache: bool  # True if it is the saved result of an earlier check
    on_full_model: bool = False  # True if the model itself was checked, since no copy can be built


def check(model: PreTrainedModel, backend: CheckedBackend = TORCH_BACKEND) -> CheckResult:
    """Run the self-check, without using saved results, and return its result.

    If no small copy can be built, the model itself is checked, which requires weights in float32.
    Raises RefusedError, with the reason, if the family is not exact or cannot be checked.
    """
    backend.admit(model)
    start, name = time.perf_counter(), f"{model.config.model_type} ({type(model).__name__})"
    on_full_model = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            small = make_small_copy(type(model), model.config, choose_rope_switch(model, backend))
        except Exception as error:  # a family's config class may raise any exception
            if model.device.type == "meta" or model.dtype != torch.float32:
                kind = log_error_kind(error)
                reason = f"cannot be checked: no small copy can be built, its code raised {kind}"
                raise SmallCopyError(_format_reason(name, reason, backend)) from error
            small, on_full_model = make_twin(model), True
    try:
        runner = backend.build(small)
        delta = max(
            measure_deviation(small, runner, backend.reference),
            measure_media_deviation(small, runner),
        )
        contradiction = measure_contradiction(small, backend.reference)
    except RefusedError:
        raise
    except Exception as error:  # a family's forward may raise any exception
        reason = f"does not run over {backend.name}: its code raised {log_error_kind(error)}"
        raise UnfinishedCheckError(_format_reason(name, reason, backend)) from error
    if not delta < LOGIT_TOLERANCE:
        difference = f"logits differ by {delta:.1e} of their spread from a full forward"
        raise RefusedError(
            _format_reason(name, f"is not exact over {backend.name}: {difference}", backend)
        )
    if not contradiction < LOGIT_TOLERANCE:
        windowed = find_thresholds(model.config.get_text_config(decoder=True))
        where, remedy = "", cache.ALTERNATIVES_HINT
        if windowed:
            where = "beyond its window "
            remedy = "use a configuration whose window is the whole context"
        raise RefusedError(
            f"{name} contradicts itself: {where}the logits of transformers' generate differ from "
            f"the logits of its own full forward by {contradiction:.1e} of their spread; {remedy}"
        )
    return CheckResult(
        type(model).__name__, delta, time.perf_counter() - start, False, on_full_model
    )


def _format_reason(name: str, reason: str, backend: CheckedBackend) -> str:
    return f"{name} {reason}" + (f"; {backend.remedy}" if backend.remedy else "")


def measure_deviation(
    model: PreTrainedModel,
    runner: Model | None = None,
    reference: ReferenceForward = run_reference,
) -> float:
    """Return the largest |delta logit| between ragged batches and full forward passes of the stock
    model, each over one sequence, relative to the spread of the logits.

    `runner` runs the batches; None: a Model on torch. Sequences join, grow by ragged blocks, are
    rolled back, permuted and removed, beyond windows of `COPY_WINDOW` tokens and beyond the cache's
    initial capacity.
    """
    seqs = CheckedSequences(model.eval(), random.Random(0), runner, reference)
    seqs.start([cache.CAPACITY_MULTIPLE - 4, 3, 11])
    for width in (1, 5, 0, 12):
        seqs.score(width)
    seqs.start([0, 6])
    for width in (4, 9):
        seqs.score(width)
    seqs.leave([1])
    seqs.score(5)
    seqs.permute([2, 0, 0, 3])
    for width in (3, 1, 1):
        seqs.score(width)
    seqs.leave([0, 1, 2, 3])
    seqs.start([3])  # a single sequence: no padding, and no encoder mask
    seqs.score(2)
    return seqs.max_delta / seqs.spread


def measure_media_deviation(model: PreTrainedModel, runner: Model) -> float:
    """Return the largest |delta logit| between `runner` and the stock model's `generate` on random
    encoder inputs. Returns 0 for families for which no random inputs can be made; these are checked
    on a user's first media."""
    if not runner.capabilities.media or not (inputs := make_random_inputs(model)):
        return 0.0
    runner.permute([])  # removes all sequences
    return media.measure_generate_deviation(model, runner, Media([], inputs))


def measure_contradiction(
    model: PreTrainedModel, reference: ReferenceForward = run_reference
) -> float:
    """Return the largest |delta logit| between the stock model's `generate`, with its cache, and
    the stock model's full forward passes over the same tokens, relative to the spread of the
    logits. The tokens go beyond windows of `COPY_WINDOW` tokens and across the rope switch
    length."""
    if model.config.is_encoder_decoder:  # its decoder starts from one token
        return _measure_contradiction_from(model, 1, 3 * COPY_WINDOW, reference)
    switch = get_rope_switch_length(model)
    starts = [3 * COPY_WINDOW] if switch is None else [3 * COPY_WINDOW, switch - 1]
    return max(_measure_contradiction_from(model, start, 4, reference) for start in starts)


@torch.inference_mode()
def _measure_contradiction_from(
    model: PreTrainedModel, prompt_length: int, num_new_tokens: int, reference: ReferenceForward
) -> float:
    dice = random.Random(1)
    ids = [[dice.randrange(2, COPY_VOCAB_SIZE) for _ in range(prompt_length)]]
    prompt_ids, source, given = torch.tensor(ids, device=model.device), None, dict[str, Any]()
    if model.config.is_encoder_decoder:
        source = torch.arange(2, 4 + 2 * COPY_WINDOW, device=model.device)[None]
        given = make_encoder_input(model, source)
    made = media.run_generate(
        model, prompt_ids, given, num_new_tokens, use_own_generate=ENCODER_OUTPUTS not in given
    )
    worst, spread = 0.0, 1e-9
    # one forward for each token, since rope may depend on the length
    for i, cached in enumerate(made.logits):
        full = reference(model, made.sequences[:, : prompt_length + i], source, 1)[0]
        worst = max(worst, float((cached[0] - full).abs().max().nan_to_num(float("inf"))))
        spread = max(spread, float(full.max() - full.min()))
    return worst / spread


class CheckedSequences:
    """Runs random operations on a model's sequences and compares its logits with the stock
    model's."""

    def __init__(
        self,
        model: PreTrainedModel,
        rng: random.Random,
        runner: Model | None = None,
        reference: ReferenceForward = run_reference,
    ) -> None:
        self.model, self.rng, self.reference = model, rng, reference
        self.runner = runner or build_torch_model(model)
        self.num_ids = min(self.runner.vocab_size, COPY_VOCAB_SIZE)
        # Length of each source in hidden states; 0: any length
        self.source_length = 10 if make_random_inputs(model) else 0
        self.seqs: list[list[int]] = []
        self.sources: list[list[int]] = []
        self.max_delta, self.spread = 0.0, 1e-9

    def draw_tokens(self, n: int) -> list[int]:
        return [self.rng.randrange(2, self.num_ids) for _ in range(n)]

    def start(self, lengths: list[int]) -> None:
        seqs = [self.draw_tokens(n) for n in lengths]
        sources = [self.draw_tokens(self.source_length or self.rng.randint(1, 10)) for _ in lengths]
        pairs = zip(seqs, sources, strict=True)
        for long, group in groupby(pairs, lambda pair: self.is_long(len(pair[0]) + 1)):
            some = list(group)
            self.runner.set_long_context(long)
            self.runner.start([t for t, _ in some], self.prepare_sources([s for _, s in some]))
        self.seqs, self.sources = self.seqs + seqs, self.sources + sources

    def prepare_sources(self, sources: list[list[int]]) -> list[list[int]] | None:
        """Return the sources for the runner; None for a decoder-only model. If the encoder takes no
        ids, set random hidden states as the runner's joining media instead, and return empty
        sources."""
        if not self.runner.encoder_decoder or takes_ids(self.model):
            return sources if self.runner.encoder_decoder else None
        tensors = [torch.tensor([s], device=self.model.device) for s in sources]
        states = [{ENCODER_OUTPUTS: make_random_states(self.model, x)} for x in tensors]
        runner: Any = self.runner
        runner.joining_media = [Media([], each) for each in states]
        return [[] for _ in sources]

    def score(self, width: int) -> None:
        """Score a random block of up to `width` tokens for each sequence, compare the logits with
        the stock model's, then roll each sequence back by a random number of at most `width`
        tokens."""
        blocks = [self.draw_tokens(self.rng.randint(width // 2, width)) for _ in self.seqs]
        need = [self.rng.randint(min(1, len(b)), len(b)) for b in blocks]
        self.rejoin_long(blocks)
        logits = self.runner.score(blocks, need)
        self.seqs = [seq + block for seq, block in zip(self.seqs, blocks, strict=True)]
        for b, n in enumerate(need):
            if n:
                self.compare(logits[b, :n], self.compute_reference(b, n))
        back = [self.rng.randint(0, min(len(t), width)) for t in self.seqs]
        self.seqs = [t[: len(t) - n] for t, n in zip(self.seqs, back, strict=True)]
        self.runner.set_lengths([len(seq) for seq in self.seqs])

    def is_long(self, length: int) -> bool:
        return self.runner.context is not None and length > self.runner.context

    def rejoin_long(self, blocks: list[list[int]]) -> None:
        """Let each sequence whose block crosses the rope switch length leave and join again."""
        if self.runner.max_context == self.runner.context:
            return
        ends = [len(seq) + len(block) for seq, block in zip(self.seqs, blocks, strict=True)]
        rows = enumerate(zip(ends, self.runner.long, blocks, strict=True))
        again = [b for b, (end, long, block) in rows if block and self.is_long(end) != long]
        order = [*list_remaining_rows(len(self.seqs), again), *again]
        self.runner.leave(again)
        for b in again:
            self.runner.set_long_context(self.is_long(ends[b]))
            self.runner.start([self.seqs[b]])
        self.runner.permute([order.index(b) for b in range(len(order))])

    def compare(self, ours: Tensor, stock: Tensor) -> None:
        difference = (ours - stock).abs().max().nan_to_num(float("inf"))
        self.max_delta = max(self.max_delta, float(difference))
        self.spread = max(self.spread, float(stock.max() - stock.min()))

    @torch.inference_mode()
    def compute_reference(self, b: int, n: int) -> Tensor:
        """Return the stock model's logits `[n, V]` for the last n tokens of sequence b."""
        token_ids = torch.tensor([self.seqs[b]], device=self.model.device)
        source = None
        if self.runner.encoder_decoder:
            source = torch.tensor([self.sources[b]], device=self.model.device)
        return self.reference(self.model, token_ids, source, n)

    def permute(self, rows: list[int]) -> None:
        self.runner.permute(rows)
        self._select(rows)

    def leave(self, rows: list[int]) -> None:
        self.runner.leave(rows)
        self._select(list_remaining_rows(len(self.seqs), rows))

    def _select(self, rows: list[int]) -> None:
        self.seqs, self.sources = [self.seqs[b] for b in rows], [self.sources[b] for b in rows]


def choose_rope_switch(model: PreTrainedModel, backend: CheckedBackend) -> int:
    """Return the length beyond which a small copy shall use the long rotary factors. If the backend
    supports the switch, the check's sequences cross this length; otherwise they do not reach it."""
    return (
        2 * COPY_WINDOW
        if backend.switches_rope and get_rope_switch_length(model) is not None
        else COPY_CONTEXT
    )
