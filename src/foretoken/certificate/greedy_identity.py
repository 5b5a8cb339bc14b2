"""Greedy texts beside the target's own: the same, but for rounding, which is measured first."""

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
    """The rows whose new text reaches one place, and the distributions there."""

    rows: list[int]
    tokens: Tensor  # [n]
    p: Tensor  # [n, V]
    q: Tensor  # [n, V]: of the drafter's first draft token there, 0 where it makes none


@torch.inference_mode()
def replay(
    target: Model,
    drafter: Drafter,
    requests: Sequence[Request],
    outputs: Sequence[list[int]],
    params: SamplingParams,
) -> Iterator[ReplayedPosition]:
    """The distributions of both at every place of the new `outputs` of the requests, which are read
    side by side. RefusedError where one of them is in use."""
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
            # as in a step before the pass, which may write where the draft token was
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
    """The target's own logits for every token of `text`, which continues the request:
    `[len(text), V]`, one row alone, a token a pass. RefusedError where the target is in use."""
    with hold_lease(target):
        target.start([request.prompt[:-1]], _copy_sources(target, [request]))
        return torch.cat(
            [_score_position(target, [request], [output], t).cpu() for t in range(len(output))]
        )


def _score_position(
    target: Model, requests: list[Request], outputs: list[list[int]], t: int
) -> Tensor:
    """The target's own logits at new place t of every row, `[B, V]`."""
    last = [
        [[request.prompt[-1], *text][t]] for request, text in zip(requests, outputs, strict=True)
    ]
    return target.score(last, [1] * len(last))[:, 0].clone()


def _get_first_q(draft: Draft, p: Tensor) -> Tensor:
    """The distribution of the first draft token of every row, `[n, V]` as p."""
    if not draft.tokens.shape[1]:
        return torch.zeros_like(p)
    drafted = (draft.lengths > 0).to(p)[:, None].cpu()
    if draft.q is not None:
        return draft.q[:, 0].cpu().nan_to_num() * drafted
    return one_hot(draft.tokens[:, 0].cpu().long(), p.shape[1]).to(p) * drafted


def _copy_sources(target: Model, requests: Sequence[Request]) -> list[list[int]] | None:
    """Copies: a drafter may keep what it is given."""
    return [list(r.source or []) for r in requests] if target.encoder_decoder else None


# Noise as a share of the logits' height above their mean. Rounding stays well below, a wrong cache
# far above: in float32 the default pair has 1.2e-6; the self-check refuses a structure from 1e-4 on
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
    """Logits of blocks against those of single tokens."""

    dtype: str  # that the target computes in
    positions: int
    noise: float  # the largest difference of any logit
    variation: float  # the largest total variation of the distributions at temperature 1
    allowed: float  # the noise that rounding explains

    @property
    def ok(self) -> bool:
        return self.noise <= self.allowed


def group_rows(count: int) -> list[list[int]]:
    """Rows that run together: all of them, and every second row alone too, as a single row may take
    another path through a model."""
    alone = [[row] for row in range(0, count, 2)] if count > 1 else []
    return [list(range(count)), *alone]


@torch.inference_mode()
def measure_shape_noise(
    target: Model, requests: Sequence[Request], outputs: Sequence[list[int]], width: int
) -> ShapeNoise:
    """Blocks of up to `width` tokens along the new `outputs` of the requests, in one batch and
    alone, some tokens of each block wrong and rolled back. RefusedError where the target is in
    use."""
    alone = [
        score_token_by_token(target, request, text)
        for request, text in zip(requests, outputs, strict=True)
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
    """Row, place and logits `[V]` at every place behind a beginning of the text."""
    live, scored = [row for row, text in enumerate(outputs) if text], [0] * len(outputs)
    sources = [list(requests[row].source or []) for row in live]
    prompts = [requests[row].prompt[:-1] for row in live]
    with hold_lease(target) as lease:
        target.start(prompts, sources if target.encoder_decoder else None)
        step = 0
        while live:
            num_correct = [
                (step + row) % width for row in live
            ]  # draft tokens that follow the text
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
    """The last token and draft tokens, of which the first `num_correct` follow the text; it ends
    with the text."""
    draft_tokens = output[scored : min(scored + width, len(output)) - 1]
    wrong = [(token + 1) % V for token in draft_tokens[num_correct:]]
    return [[request.prompt[-1], *output][scored], *draft_tokens[:num_correct], *wrong]


NOISE_MARGIN = (
    4  # times the noise measured: both logits move, and more passes would show more noise
)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two greedy texts differ first."""

    prompt: int
    gamma: int
    place: int  # among the new tokens
    plain: int | None  # the tokens there, None where the text had ended
    speculative: int | None
    gap: float | None  # between the logits of the two, from single-token passes
    verdict: str  # "float noise" or "bug"


def find_first_difference(
    target: Model,
    request: Request,
    plain: Sequence[int],
    speculative: Sequence[int],
    shapes: ShapeNoise,
    prompt_and_gamma: tuple[int, int],
) -> Difference | None:
    """None where the texts are equal; `where`: prompt and gamma."""
    pairs = enumerate(zip(plain, speculative, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), min(len(plain), len(speculative)))
    if position == len(plain) == len(speculative):
        return None
    if position in (len(plain), len(speculative)):  # one text is longer: never rounding
        a, b = [text[position] if position < len(text) else None for text in (plain, speculative)]
        return Difference(*prompt_and_gamma, position, a, b, None, "bug")
    a, b = plain[position], speculative[position]
    logits = score_token_by_token(target, request, list(plain[: position + 1]))[position].double()
    if (controls := build_chain(request, target.vocab_size)) is not None:
        logits = controls.shape(logits, list(plain[:position]))
    gap = float((logits[a] - logits[b]).abs())
    noise = shapes.ok and gap <= NOISE_MARGIN * shapes.noise
    return Difference(*prompt_and_gamma, position, a, b, gap, "float noise" if noise else "bug")
