"""Test whether greedy outputs with draft tokens equal those of plain decoding, except for rounding,
which is measured first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.controls.chain import build_chain
from foretoken.drafters.base import Draft, Drafter
from foretoken.lease import hold_lease
from foretoken.models.base import Model
from foretoken.request import Request
from foretoken.sampling.distributions import SamplingParams, one_hot, probabilities
from foretoken.sampling.draw import Draw


@dataclass(frozen=True, slots=True)
class ReplayedPosition:
    """One position of replayed outputs: the outputs that have a token there, these tokens, and the
    distributions of target and drafter."""

    rows: list[int]  # indices of these outputs
    tokens: Tensor  # [n]
    p: Tensor  # [n, V]
    q: Tensor  # [n, V]: of the draft token there; 0 if the drafter proposes none


@torch.inference_mode()
def replay(
    target: Model,
    drafter: Drafter,
    requests: Sequence[Request],
    outputs: Sequence[list[int]],
    params: SamplingParams,
) -> Iterator[ReplayedPosition]:
    """Run target and drafter on given outputs of requests, in one batch, and yield their
    distributions at every position. Raises RefusedError if a model is in use."""
    live = list(range(len(outputs)))
    chains = [build_chain(request, target.vocab_size) for request in requests]
    sources = _copy_sources(target, requests)
    with hold_lease(target, drafter) as lease:
        lease.count_joining(len(outputs))
        target.start([request.prompt[:-1] for request in requests], sources)
        drafter.start(live, [list(request.prompt) for request in requests], sources)
        for t in range(max(map(len, outputs), default=0)):
            finished = [b for b, row in enumerate(live) if len(outputs[row]) <= t]
            if finished:
                lease.leave(finished)
                live = [row for row in live if len(outputs[row]) > t]
            keys = [requests[row].key for row in live]
            lengths = [len(requests[row].prompt) + t for row in live]
            sampling, shaping = [params] * len(live), [chains[row] for row in live]
            # before the target's forward pass, as in a step: it may overwrite the draft's cache
            draft = drafter.propose([1] * len(live), Draw(keys, lengths, sampling, shaping))
            p = _score_position(
                target, [requests[row] for row in live], [outputs[r] for r in live], t
            )
            for b, row in enumerate(live):
                if (controls := chains[row]) is not None:
                    p[b] = controls.shape(p[b], [])
            tokens = [outputs[row][t] for row in live]
            p = probabilities(p, params).cpu()
            yield ReplayedPosition(live, torch.tensor(tokens), p, _get_first_q(draft, p))
            drafter.commit([[token] for token in tokens])
            for row in live:
                if (controls := chains[row]) is not None:
                    controls.commit([outputs[row][t]])


@torch.inference_mode()
def score_token_by_token(target: Model, request: Request, output: list[int]) -> Tensor:
    """Return the target's logits, before controls, for every token of a request's output,
    `[len(output), V]`: for the sequence alone, with one token per forward pass. Raises RefusedError
    if the target is in use."""
    with hold_lease(target):
        target.start([request.prompt[:-1]], _copy_sources(target, [request]))
        return torch.cat(
            [_score_position(target, [request], [output], t).cpu() for t in range(len(output))]
        )


def _score_position(
    target: Model, requests: list[Request], outputs: list[list[int]], t: int
) -> Tensor:
    """Return the target's logits, before controls, for token t of every output, `[B, V]`."""
    last = [
        [[request.prompt[-1], *output][t]]
        for request, output in zip(requests, outputs, strict=True)
    ]
    return target.score(last, [1] * len(last))[:, 0].clone()


def _get_first_q(draft: Draft, p: Tensor) -> Tensor:
    """Return the distribution of each sequence's first draft token, `[n, V]`, with the dtype of p;
    0 for rows without one."""
    if not draft.tokens.shape[1]:
        return torch.zeros_like(p)
    drafted = (draft.lengths > 0).to(p)[:, None].cpu()
    if draft.q is not None:
        return draft.q[:, 0].cpu().nan_to_num() * drafted
    return one_hot(draft.tokens[:, 0].cpu().long(), p.shape[1]).to(p) * drafted


def _copy_sources(target: Model, requests: Sequence[Request]) -> list[list[int]] | None:
    """Return copies of the encoder inputs, as a drafter may store them; None without an encoder."""
    return [list(r.source or []) for r in requests] if target.encoder_decoder else None


# Limits of the noise, divided by the distance between the logits' maximum and mean. Rounding stays
# well below them (1.2e-6 for the default pair in float32), and a wrong cache exceeds them by far.
# The self-check has the same limit in float32
NOISE_TOLERANCE = {
    "float64": 1e-9,
    "float32": 1e-4,
    "float16": 2e-2,
    "int8": 5e-2,
    "int4": 5e-2,
    "bfloat16": 1e-1,
}
NONFINITE_NOISE = 1e30  # stands for NaN and infinity


@dataclass(frozen=True, slots=True)
class ShapeNoise:
    """The differences between the logits of tokens scored in blocks and of the same tokens scored
    one by one."""

    dtype: str  # of the target's arithmetic
    positions: int  # number of positions compared
    noise: float  # the largest difference of any logit
    variation: float  # the largest total variation distance at temperature 1
    allowed: float  # the largest noise that rounding explains

    @property
    def ok(self) -> bool:
        return self.noise <= self.allowed


def group_rows(count: int) -> list[list[int]]:
    """Return the batches to run, as lists of sequence indices: all together, then every second one
    alone, because models may compute a single sequence differently."""
    alone = [[row] for row in range(0, count, 2)] if count > 1 else []
    return [list(range(count)), *alone]


@torch.inference_mode()
def measure_shape_noise(
    target: Model, requests: Sequence[Request], outputs: Sequence[list[int]], width: int
) -> ShapeNoise:
    """Score outputs of requests in blocks of up to `width` tokens, and compare the logits with
    those of scoring one token at a time. Some tokens of each block are made wrong and rolled back
    afterwards. The sequences run in one batch and alone. Raises RefusedError if the target is in
    use."""
    alone = [
        score_token_by_token(target, request, output)
        for request, output in zip(requests, outputs, strict=True)
    ]
    noise = variation = height = 0.0
    positions = 0
    for rows in group_rows(len(requests)):
        own = [requests[row] for row in rows], [outputs[row] for row in rows]
        for b, at, logits in _score_blocks(target, *own, width):
            expected, logits = alone[rows[b]][at].double(), logits.double().cpu()
            distances = torch.where(logits == expected, 0.0, (logits - expected).abs())
            apart = logits.softmax(-1) - expected.softmax(-1)
            noise = max(
                noise, float(distances.nan_to_num(NONFINITE_NOISE, posinf=NONFINITE_NOISE).max())
            )
            variation = max(variation, float(apart.abs().sum() / 2))
            finite = expected[expected.isfinite()]
            height += float(finite.max() - finite.mean())
            positions += 1
    allowed = NOISE_TOLERANCE[target.compute_dtype] * height / max(1, positions)
    return ShapeNoise(target.compute_dtype, positions, noise, variation, allowed)


def _score_blocks(
    target: Model, requests: Sequence[Request], outputs: Sequence[list[int]], width: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Score the outputs in blocks, with some wrong tokens. Yield (row, position, logits `[V]`) for
    every position with only correct tokens before it; these cover the outputs."""
    live, scored = [row for row, output in enumerate(outputs) if output], [0] * len(outputs)
    sources = [list(requests[row].source or []) for row in live]
    prompts = [requests[row].prompt[:-1] for row in live]
    with hold_lease(target) as lease:
        target.start(prompts, sources if target.encoder_decoder else None)
        step = 0
        while live:
            # the number of draft tokens of each block that equal the output
            num_correct = [(step + row) % width for row in live]
            blocks = [
                _make_block(
                    requests[row], outputs[row], scored[row], width, good, target.vocab_size
                )
                for row, good in zip(live, num_correct, strict=True)
            ]
            logits = target.score(blocks, [len(block) for block in blocks]).clone()
            for b, row in enumerate(live):
                for i in range(min(num_correct[b] + 1, len(blocks[b]))):
                    yield row, scored[row] + i, logits[b, i]
                scored[row] += min(num_correct[b] + 1, len(blocks[b]))
            target.set_lengths([len(requests[row].prompt) - 1 + scored[row] for row in live])
            finished = [b for b, row in enumerate(live) if scored[row] == len(outputs[row])]
            lease.leave(finished)
            live = [row for row in live if scored[row] < len(outputs[row])]
            step += 1


def _make_block(
    request: Request, output: list[int], scored: int, width: int, num_correct: int, V: int
) -> list[int]:
    """Return the last scored token and draft tokens, of which the first `num_correct` equal the
    output and the others do not."""
    draft_tokens = output[scored : min(scored + width, len(output)) - 1]
    wrong = [(token + 1) % V for token in draft_tokens[num_correct:]]
    return [[request.prompt[-1], *output][scored], *draft_tokens[:num_correct], *wrong]


# Gaps up to this many times the measured noise count as rounding: both logits have noise, and more
# forward passes would have shown more of it
NOISE_MARGIN = 4


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between two greedy outputs."""

    prompt: int
    gamma: int
    place: int  # index of the token in the output
    plain: int | None  # the token there; None if the output had ended
    speculative: int | None
    gap: float | None  # between the logits of the two tokens, scored token by token
    verdict: str  # "float noise" or "bug"


def find_first_difference(
    target: Model,
    request: Request,
    plain: Sequence[int],
    speculative: Sequence[int],
    shapes: ShapeNoise,
    prompt_and_gamma: tuple[int, int],
) -> Difference | None:
    """Return the first difference between two greedy outputs of a request, and whether rounding
    explains it; None if they are equal. prompt_and_gamma: the first two fields of the result."""
    pairs = enumerate(zip(plain, speculative, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), min(len(plain), len(speculative)))
    if position == len(plain) == len(speculative):
        return None
    if position in (len(plain), len(speculative)):  # one output is longer: never rounding
        a, b = [x[position] if position < len(x) else None for x in (plain, speculative)]
        return Difference(*prompt_and_gamma, position, a, b, None, "bug")
    a, b = plain[position], speculative[position]
    logits = score_token_by_token(target, request, list(plain[: position + 1]))[position].double()
    if (controls := build_chain(request, target.vocab_size)) is not None:
        logits = controls.shape(logits, list(plain[:position]))
    gap = float((logits[a] - logits[b]).abs())
    noise = shapes.ok and gap <= NOISE_MARGIN * shapes.noise
    return Difference(*prompt_and_gamma, position, a, b, gap, "float noise" if noise else "bug")
