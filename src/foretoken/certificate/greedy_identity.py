"""Test whether greedy outputs with draft tokens equal the outputs of plain decoding, except for
rounding. The rounding is measured first."""

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
    """One position of replayed outputs: the outputs that have a token at this position, these
    tokens, and the distributions of target and drafter there."""

    rows: list[int]  # indices of these outputs
    tokens: Tensor  # [n]
    p: Tensor  # [n, V]
    q: Tensor  # [n, V]: of the draft token; 0 if the drafter proposes no token


@torch.inference_mode()
def replay(
    target: Model,
    drafter: Drafter,
    requests: Sequence[Request],
    outputs: Sequence[list[int]],
    params: SamplingParams,
) -> Iterator[ReplayedPosition]:
    """Run target and drafter over given outputs of requests, in one batch. Yield the distributions
    of target and drafter at every position. Raises RefusedError if a model is in use."""
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
            # draft first, as in a step: the target's forward pass may overwrite the draft's cache
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
    `[len(output), V]`. Each forward pass has batch size 1 and one token. Raises RefusedError if the
    target is in use."""
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
    0 for sequences without draft tokens."""
    if not draft.tokens.shape[1]:
        return torch.zeros_like(p)
    drafted = (draft.lengths > 0).to(p)[:, None].cpu()
    if draft.q is not None:
        return draft.q[:, 0].cpu().nan_to_num() * drafted
    return one_hot(draft.tokens[:, 0].cpu().long(), p.shape[1]).to(p) * drafted


def _copy_sources(target: Model, requests: Sequence[Request]) -> list[list[int]] | None:
    """Return copies of the encoder inputs, which a drafter may store; None without an encoder."""
    return [list(r.source or []) for r in requests] if target.encoder_decoder else None


# Limits of the noise, relative to the distance between the maximum and the mean of the logits.
# Rounding stays well below these limits (1.2e-6 for the default pair in float32), and a wrong cache
# exceeds them by far. The self-check has the same limit in float32
NOISE_TOLERANCE = {
    "float64": 1e-9,
    "float32": 1e-4,
    "float16": 2e-2,
    "int8": 5e-2,
    "int4": 5e-2,
    "bfloat16": 1e-1,
}
NONFINITE_NOISE = 1e30  # replaces a noise of NaN or infinity


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
    """Return the batches to run, as lists of sequence indices: one batch of all sequences, then a
    batch of one for every second sequence, because models may compute batch size 1 differently."""
    alone = [[row] for row in range(0, count, 2)] if count > 1 else []
    return [list(range(count)), *alone]


@torch.inference_mode()
def measure_shape_noise(
    target: Model, requests: Sequence[Request], outputs: Sequence[list[int]], width: int
) -> ShapeNoise:
    """Score outputs of requests in blocks of up to `width` tokens, and compare the logits with the
    logits of scoring one token at a time. Some tokens of each block are wrong on purpose, and are
    rolled back afterwards. The sequences run in the batches of `group_rows`. Raises RefusedError if
    the target is in use."""
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
    every position of the outputs, scored after correct tokens only."""
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
    """Return a block: the last scored token, `num_correct` draft tokens that equal the output, and
    draft tokens that do not."""
    draft_tokens = output[scored : min(scored + width, len(output)) - 1]
    wrong = [(token + 1) % V for token in draft_tokens[num_correct:]]
    return [[request.prompt[-1], *output][scored], *draft_tokens[:num_correct], *wrong]


# A gap between two logits that is at most NOISE_MARGIN times the measured noise counts as rounding:
# both logits have noise, and more forward passes would have shown larger noise
NOISE_MARGIN = 4


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between two greedy outputs."""

    prompt: int
    gamma: int
    place: int  # index of the token in the output
    plain: int | None  # token of the plain output; None if this output ended earlier
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
    explains it; None if the outputs are equal. prompt_and_gamma: the result's first two fields."""
    pairs = enumerate(zip(plain, speculative, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), min(len(plain), len(speculative)))
    if position == len(plain) == len(speculative):
        return None
    if position in (len(plain), len(speculative)):  # one output is longer: not from rounding
        a, b = [x[position] if position < len(x) else None for x in (plain, speculative)]
        return Difference(*prompt_and_gamma, position, a, b, None, "bug")
    a, b = plain[position], speculative[position]
    logits = score_token_by_token(target, request, list(plain[: position + 1]))[position].double()
    if (controls := build_chain(request, target.vocab_size)) is not None:
        logits = controls.shape(logits, list(plain[:position]))
    gap = float((logits[a] - logits[b]).abs())
    noise = shapes.ok and gap <= NOISE_MARGIN * shapes.noise
    return Difference(*prompt_and_gamma, position, a, b, gap, "float noise" if noise else "bug")
