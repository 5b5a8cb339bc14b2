"""Measuring a pair: how far they agree, and what everything costs on this machine.

Every prompt is continued plainly and speculatively, in turn, and its plain text is replayed to the
drafter. The target's pass over n new tokens of one row, v(n), is timed as the step times it: on the
engine's threads, behind passes of the same size. plan.py says what other gammas would gain.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from math import exp, log
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from foretoken.costing import contention
from foretoken.drafters.base import Drafter
from foretoken.drafters.none import NoDrafter
from foretoken.engine.batch import threads
from foretoken.errors import ForetokenError, InputError
from foretoken.lease import leased
from foretoken.loading import named
from foretoken.loading.hub import gguf
from foretoken.loading.options import ROUNDED
from foretoken.loading.sources import source
from foretoken.measurement.agreement import overlaps
from foretoken.measurement.estimate import Estimate, Spread, mean, ratio, spread
from foretoken.measurement.machine import Machine, bandwidth, describe, peak_bytes
from foretoken.measurement.result import (
    Footprint,
    MeasuredRun,
    Measurement,
    MeasureOptions,
    Observed,
    Position,
    Step,
)
from foretoken.models.base import Model
from foretoken.options import Prompt
from foretoken.records import StepRecord
from foretoken.request import Completion, Request, uninterrupted
from foretoken.sampling.distributions import check
from foretoken.speculator import Speculator

# Untimed passes ahead of the timed ones, which are then in the steady state of generation. A
# runtime may lay out its work anew for another size, or for a while pad a smaller one to the last:
# the first size follows a pass of any size, the others follow a smaller one.
FIRST, SETTLE = 20, 2


@torch.inference_mode()
def passes(
    target: Model, request: Request, text: list[int], most: int, repeats: int = 1
) -> tuple[list[list[float]], int]:
    """Time the target's forward over 1, 2, .., `most` tokens; also return the tokens before it.

    `text`: prompt and new tokens of the request; the passes are behind half of the new ones, or
    fewer where the target's context is too small. RefusedError where the target is in use.
    """
    context = (len(text) + len(request.prompt)) // 2
    if target.context is not None:
        context = min(context, max(0, target.context - most))
        most = min(most, target.context - context)
    ahead = (text[context:] or text) * most  # the tokens read; any will do
    times: list[list[float]] = []
    with leased(target), threads(target):
        target.start([text[:context]], None if request.source is None else [request.source])
        for n in range(1, most + 1):
            settle = FIRST if n == 1 else SETTLE
            seconds = [_pass(target, ahead[:n], context) for _ in range(settle + repeats)]
            times.append(seconds[settle:])
    return times, context


def _pass(target: Model, block: list[int], context: int) -> float:
    """Time one forward after `context` tokens, and roll it back."""
    start = perf_counter()
    logits = target.score([block], [len(block)])
    check(logits, "target", [context], [len(block)])  # reads the logits, so waits for them
    seconds = perf_counter() - start
    target.set_lengths([context])
    return seconds


PASSES = 16  # v(n) is measured for n up to this
REPEATS = 9  # at least, of each pass
WARM_UP = 8  # new tokens; first calls are slow

Track = Callable[[Sequence[int]], Iterable[int]]


def digest(prompts: Sequence[Prompt]) -> str:
    """Return the SHA-256 of a list of prompts."""
    return hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()


def measure(
    spec: Speculator,
    prompts: Sequence[Prompt],
    options: MeasureOptions,
    *,
    done: Sequence[Observed] = (),
    keep: Callable[[Observed], object] = lambda observed: None,
    track: Track = lambda numbers: numbers,
) -> Measurement:
    """Measure `spec`, loaded as `options` say, on two prompts or more.

    done: the first prompts, measured before; keep: called with each of the others; track: an
    iterable around their numbers, for a progress bar.
    Raises InputError for prompts that the models cannot continue, KeyboardInterrupt where a run was
    interrupted.
    """
    if isinstance(spec.drafter, NoDrafter):
        raise InputError("the drafter guesses nothing; give another to measure")
    machine = describe(spec.target.device)
    requests = spec.inputs.requests(list(prompts), options.sampling_params, options.seed)
    for gamma in (0, options.gamma):
        _run(spec, prompts[0], replace(options, max_new_tokens=WARM_UP), 0, gamma)
    repeats, observed = -(-REPEATS // len(prompts)), list(done)
    for i in track(range(len(done), len(prompts))):
        observed.append(_observe(spec, prompts[i], requests[i], options, i, repeats))
        keep(observed[-1])
    return _summary(spec, options, observed, machine)


def _observe(
    spec: Speculator,
    prompt: Prompt,
    request: Request,
    options: MeasureOptions,
    i: int,
    repeats: int,
) -> Observed:
    """Measure one prompt with its costs, so that a busy machine slows down all that is compared.

    The plain and the speculative run alternate in coming first.
    """
    reading, runs = contention.read(), dict[int, Completion]()
    for gamma in (0, options.gamma) if i % 2 else (options.gamma, 0):
        runs[gamma] = _run(spec, prompt, options, i, gamma)
    plain = runs[0]
    betas = overlaps(spec.target, spec.drafter, request, plain.tokens, options.sampling)
    text, most = [*request.prompt, *plain.tokens], max(PASSES, options.gamma + 1)
    seconds, context = passes(spec.target, request, text, most, repeats)
    return Observed(
        prompt_tokens=len(request.source or request.prompt),
        overlaps=[None if b is None else round(b, 6) for b in betas],
        plain=_summed(plain),
        loop=_summed(runs[options.gamma]),
        context=context,
        passes=seconds,
        taken=contention.taken(reading),
    )


def _run(
    spec: Speculator, prompt: Prompt, options: MeasureOptions, row: int, gamma: int
) -> Completion:
    rows = spec.generate(
        [prompt],
        options.sampling_params,
        gamma=gamma,
        seed=[(options.seed, row)],
    )
    (completion,) = uninterrupted(rows)
    return completion


def _summed(completion: Completion) -> MeasuredRun:
    tokens, seconds, steps = completion.steady
    return MeasuredRun(tokens, seconds, [_step(step) for step in steps])


def _step(step: StepRecord) -> Step:
    return Step(
        gamma=step.gamma,
        drafted=step.drafted,
        judged=len(step.overlaps),
        accepted=step.accepted,
        kept=len(step.kept),
        overlap=sum(step.overlaps),
        draft_seconds=step.draft_seconds,
        score_seconds=step.score_seconds,
    )


def _summary(
    spec: Speculator, options: MeasureOptions, observed: list[Observed], machine: Machine
) -> Measurement:
    loops = [one.loop for one in observed]
    steps = [step for loop in loops for step in loop.steps]
    betas = [[0.0 if b is None else b for b in one.overlaps] for one in observed]
    silent = [b is None for one in observed for b in one.overlaps]
    trust = options.trust_remote_code
    target_loading = options.dtype, options.revision
    draft_loading = _draft_dtype(spec, options), options.draft_revision
    drafted = [step.draft_seconds / step.drafted for step in steps if step.drafted]
    peak = peak_bytes(spec.target.device)  # before the large read
    read, read_bytes = bandwidth(spec.target.device)
    return Measurement(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        options=options,
        machine=machine,
        target=of_model(spec.target, spec.target_name, *target_loading, trust=trust),
        draft=of_drafter(spec.drafter, spec.draft_name, *draft_loading, trust=trust),
        alpha=_known(ratio([sum(b) for b in betas], [len(b) for b in betas], 0, 1)),
        alpha_in_loop=_in_loop(loops),
        silent=fmean(silent),
        positions=[_position(steps, i) for i in range(1, options.gamma + 1)],
        tokens=fmean(len(one.overlaps) for one in observed),
        tokens_per_call=_tokens_per_call(loops, options.gamma),
        draft_seconds=spread(drafted) if drafted else None,
        context=median(one.context for one in observed),
        passes=_passes(observed),
        plain_overhead=_overhead([one.plain for one in observed]),
        loop_overhead=_overhead(loops),
        speedup=_speedup(observed),
        prompts=observed,
        others=contention.share(one.taken for one in observed),
        read_bytes=read_bytes,
        read=read,
        peak_bytes=peak,
    )


def _draft_dtype(spec: Speculator, options: MeasureOptions) -> str:
    """Return the draft's dtype, as given or as chosen at loading."""
    computed = "" if spec.drafter.model is None else spec.drafter.model.computed
    return computed if computed in ROUNDED else options.draft_dtype or options.dtype


def _in_loop(loops: list[MeasuredRun]) -> Estimate | None:
    sums = [sum(step.overlap for step in loop.steps) for loop in loops]
    return ratio(sums, [sum(step.judged for step in loop.steps) for loop in loops], 0, 1)


def _position(steps: list[Step], i: int) -> Position:
    """Count draft token i, from 1; a step that ended the text before it does not count."""
    room = [step for step in steps if step.gamma >= i]
    steps_at = [step for step in room if step.accepted >= i - 1 and step.kept >= i]
    judged = sum(step.judged >= i for step in steps_at)
    kept = sum(step.accepted >= i for step in steps_at)
    offered = sum(step.drafted >= i for step in room) / len(room) if room else 0.0
    return Position(len(steps_at), judged, kept, offered)


def _passes(observed: list[Observed]) -> list[Spread]:
    """Return forwards over 1, 2, .. tokens, as far as all prompts left room."""
    by_size = zip(*(one.passes for one in observed), strict=False)
    return [spread([seconds for times in same for seconds in times]) for same in by_size]


def _overhead(runs: list[MeasuredRun]) -> Spread:
    """Return the seconds of a step outside draft and score, a mean per run."""
    return spread(
        [
            (run.seconds - sum(s.draft_seconds + s.score_seconds for s in run.steps))
            / len(run.steps)
            for run in runs
        ]
    )


def _tokens_per_call(loops: list[MeasuredRun], gamma: int) -> Estimate:
    calls = [len(run.steps) for run in loops]
    return _known(ratio([run.tokens for run in loops], calls, 1, gamma + 1))


def _speedup(observed: list[Observed]) -> Estimate:
    """Return the geometric mean over prompts of plain over speculative seconds per token."""
    pairs = [(one.plain, one.loop) for one in observed]
    logs = [log(a.seconds / a.tokens) - log(b.seconds / b.tokens) for a, b in pairs]
    log_ratio = _known(mean(logs))
    return Estimate(exp(log_ratio.value), exp(log_ratio.low), exp(log_ratio.high))


def _known(estimate: Estimate | None) -> Estimate:
    assert estimate is not None  # two prompts or more, each with a token
    return estimate


PYTHON = "python"  # the runtime of a drafter without a network


def of_model(
    model: Model, name: str, dtype: str, revision: str | None = None, *, trust: bool = False
) -> Footprint:
    """Return the sizes of a model that was loaded with these options, not measured: its bytes are
    those of its graph on ONNX Runtime, and elsewhere follow from the shapes of its parameters."""
    network = _network(model, name, revision, trust)
    facts = (name, model.runtime, dtype, model.encoder_decoder)
    if network is None:
        return Footprint(*facts, None, None)
    numbers, products = sum(each.numel() for each in network.parameters()), _products(network)
    weight_bytes, pass_bytes = _read_bytes(model, network) or (None, None)
    if pass_bytes is None and not (model.runtime == "openvino" and gguf(name, revision)):
        # a GGUF file's blocks have any bits
        kind = getattr(network.config, "dtype", None) if dtype == "auto" else getattr(torch, dtype)
        kind = kind if isinstance(kind, torch.dtype) else torch.float32
        head = getattr(network.get_output_embeddings(), "weight", None)
        heads = {} if head is None else {id(head): head.numel()}
        embedded = heads | {id(each): each.numel() for each in _embeddings(network)}
        weight_bytes = _bytes(numbers, sum(embedded.values()), kind, dtype)
        pass_bytes = _bytes(products, sum(heads.values()), kind, dtype)
    cache_bytes = getattr(model, "token_bytes", None)
    return Footprint(
        *facts, numbers, 2 * products, weight_bytes, pass_bytes, cache_bytes=cache_bytes
    )


def _read_bytes(model: Model, network: PreTrainedModel) -> tuple[int, int] | None:
    """Return the bytes of a model's graph and embeddings on ONNX Runtime, and those of the graph
    that a pass over one token reads; None elsewhere."""
    passes: Any = getattr(model, "passes", None)
    if model.runtime != "onnx" or passes is None:
        return None
    table = 0 if passes.table is None else passes.table.nbytes
    share = _products(network) / _products(network, all_experts=True)
    return passes.constant_bytes + table, round(passes.constant_bytes * share)


FOUR_BITS = 0.5 + 2 / 64  # bytes of a weight, with its share of a group's scale


def _bytes(numbers: int, embedded: int, kind: torch.dtype, dtype: str) -> int:
    """Return the bytes of weights of which so many are embeddings or output layer, which stay in
    eight bits where the others have four."""
    if dtype == "int4":
        return round((numbers - embedded) * FOUR_BITS) + embedded
    return numbers * kind.itemsize


def of_drafter(
    drafter: Drafter, name: str, dtype: str, revision: str | None = None, *, trust: bool = False
) -> Footprint:
    """Return the sizes of a drafter; of one that is no model they are not known."""
    if drafter.model is not None:
        place = str(named.draft(name) or name)
        model = of_model(drafter.model, place, dtype, revision, trust=trust)
        return replace(model, name=name)
    none = 0 if drafter.runtime == PYTHON else None  # else it has products that are not counted
    return Footprint(name, drafter.runtime, "", False, None, none)


def _network(model: Model, name: str, revision: str | None, trust: bool) -> PreTrainedModel | None:
    """Return the network, or one without weights; None where transformers cannot build it."""
    network = getattr(model, "model", None)
    if isinstance(network, PreTrainedModel):
        return network
    if getattr(model, "runtime", None) == "table":
        return None
    try:
        return source(name, revision, trust).empty
    except ForetokenError:  # the figures are then unknown
        return None


def _products(network: PreTrainedModel, *, all_experts: bool = False) -> int:
    """Count the weights that are multiplied with one token of a decoder's text.

    Without embeddings, unless they are the output layer too, and with the share of experts that a
    token meets, or all. Cross-attention's keys and values, made once per source, are counted.
    """
    head = network.get_output_embeddings()
    skipped = {id(weight) for weight in _embeddings(network)} | _encoder(network)
    skipped -= {id(head.weight)} if isinstance(head, nn.Linear) else set()
    share = 1.0 if all_experts else _experts_share(network.config)
    total = 0.0
    for name, weight in network.named_parameters():
        if weight.ndim >= 2 and id(weight) not in skipped:
            total += weight.numel() * (share if ".experts." in name else 1.0)
    return round(total)


def _embeddings(network: PreTrainedModel) -> list[Tensor]:
    return [part.weight for part in network.modules() if isinstance(part, nn.Embedding)]


def _encoder(network: PreTrainedModel) -> set[int]:
    """Ids of the encoder's weights, which run once per source."""
    if not network.config.is_encoder_decoder:
        return set()
    return {id(weight) for weight in network.get_encoder().parameters()}


def _experts_share(config: PreTrainedConfig) -> float:
    config = config.get_text_config(decoder=True)
    used = getattr(config, "num_experts_per_tok", None)
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        experts = getattr(config, name, None)
        if used and experts:
            return used / experts
    return 1.0
