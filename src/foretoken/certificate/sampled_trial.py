"""Tests of sampled outputs: each token must have the target's distribution, and whole outputs must
have the same distribution as outputs of plain decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from foretoken.certificate.greedy_identity import replay
from foretoken.drafters.base import Drafter
from foretoken.inputs import Prompt
from foretoken.measurement.estimate import (
    HypothesisTest,
    compute_uniforms,
    run_correlation_test,
    run_frequency_test,
    run_two_sample_test,
    run_uniformity_test,
)
from foretoken.request import require_uninterrupted
from foretoken.sampling.acceptance_rules import Rule
from foretoken.sampling.params import SamplingParams
from foretoken.speculator import MAX_BATCH_SIZE, Speculator

TokenTuple = tuple[int, ...]
Track = Callable[[Sequence[int], str], Iterable[int]]
# Every 11th output has batch size 1; 11 is prime, so that every prompt has such outputs
UNBATCHED_STRIDE = 11
PLAIN_RULE = "speculative"  # plain decoding must not use the rule that is certified


@dataclass(frozen=True, slots=True)
class SampledTrial:
    """A trial: `num_samples` outputs of `num_new_tokens` new tokens for every prompt."""

    spec: Speculator
    prompts: Sequence[Prompt]
    params: SamplingParams
    gamma: int
    rule: str | Rule
    num_samples: int
    num_new_tokens: int
    seed: int
    track: Track = lambda numbers, label: numbers
    label: str = "speculative"
    stream: int = 0  # of random numbers; trials with different streams are independent

    @property
    def name(self) -> str:
        params = self.params
        parts = [f"temperature {params.temperature:g}"]
        parts += [f"top-k {params.top_k}"] * (params.top_k > 0)
        parts += [f"top-p {params.top_p:g}"] * (params.top_p < 1)
        parts += [f"min-p {params.min_p:g}"] * (params.min_p > 0)
        return ", ".join(parts)

    def generate_batches(self) -> Iterator[tuple[list[Prompt], list[list[int]]]]:
        """Yield batches of prompts with one output for each prompt; the prompts take turns. If
        gamma is above 0, some outputs are generated with batch size 1, which models may compute
        differently."""
        count, params = len(self.prompts), replace(self.params, max_new_tokens=self.num_new_tokens)
        last = self.num_samples * count
        for first in self.track(range(0, last, MAX_BATCH_SIZE), f"{self.name}: {self.label}"):
            batch = range(first, min(first + MAX_BATCH_SIZE, last))
            alone = [k for k in batch if self.gamma and k % UNBATCHED_STRIDE == 0]
            outputs: dict[int, list[int]] = {}
            for numbers in ([k for k in batch if k not in alone], *([k] for k in alone)):
                completions = self.spec.generate(
                    [self.prompts[k % count] for k in numbers],
                    params,
                    gamma=self.gamma,
                    rule=self.rule,
                    seed=[(self.seed, (self.stream << 32) + k) for k in numbers],
                )
                tokens = (each.tokens for each in require_uninterrupted(completions))
                outputs |= zip(numbers, tokens, strict=True)
            yield [self.prompts[k % count] for k in batch], [outputs[k] for k in batch]

    def group_by_prompt(self, outputs: Sequence[list[int]]) -> list[list[TokenTuple]]:
        """Return the outputs of all batches, one list for each prompt."""
        return [[*map(tuple, outputs[i :: len(self.prompts)])] for i in range(len(self.prompts))]


def run_target_tests(
    trial: SampledTrial, drafter: Drafter, level: float
) -> tuple[list[HypothesisTest], list[list[TokenTuple]]]:
    """Test whether sampled tokens have the target's distribution. Return the tests, and the outputs
    of each prompt. drafter: the drafter without planted bugs, for q."""
    spec, all_outputs = trial.spec, list[list[int]]()
    ranked, by_id = list[Tensor](), list[Tensor]()  # by_id: one tensor for each output
    hits, chances = list[Tensor](), list[Tensor]()  # for each token: whether q > p; P(q > p)
    noise = torch.Generator().manual_seed(trial.seed + 1)
    for prompts, outputs in trial.generate_batches():
        sampling = replace(trial.params, max_new_tokens=trial.num_new_tokens)
        requests = spec.inputs.make_requests(prompts, sampling, trial.seed)
        by_row: list[list[Tensor]] = [[] for _ in outputs]
        for position in replay(spec.target, drafter, requests, outputs, trial.params):
            fresh = torch.rand(len(position.rows), generator=noise, dtype=torch.float64)
            u = compute_uniforms(position.p, position.tokens, fresh)
            ranked.append(u.ranked)
            for row, number in zip(position.rows, u.by_id.split(1), strict=True):
                by_row[row].append(number)
            above = position.q.double() > position.p.double()
            hits.append(above.gather(1, position.tokens[:, None])[:, 0].double())
            chances.append(position.p.double().where(above, 0.0).sum(-1).clamp(max=1.0))
        by_id += [torch.cat(row) for row in by_row if row]
        all_outputs += outputs
    name, unit, pull = trial.name, "tokens", (torch.cat(hits), torch.cat(chances))
    target = f"{name}: target's distribution"
    tests = [
        run_uniformity_test(f"{target}, by rank", unit, torch.cat(ranked), level),
        run_uniformity_test(f"{target}, by id", unit, torch.cat(by_id), level),
        run_frequency_test(f"{name}: pull towards the draft", unit, *pull, level),
        run_correlation_test(f"{name}: independence of positions", unit, by_id, trial.gamma + 1),
    ]
    return tests, trial.group_by_prompt(all_outputs)


class PrefixCells:
    """Cells for a chi-square test: each output is in the cell of its longest frequent prefix. A
    prefix is frequent if it is empty or if at least `share` of the outputs in `sample` begin with
    it."""

    def __init__(self, sample: Iterable[TokenTuple], share: float = 0.04) -> None:
        outputs = list(sample)
        counts = Counter(output[:n] for output in outputs for n in range(1, len(output) + 1))
        frequent = [prefix for prefix, count in counts.items() if count >= share * len(outputs)]
        self._cells = {prefix: i for i, prefix in enumerate([(), *sorted(frequent)])}

    def count(self, outputs: Iterable[TokenTuple]) -> np.ndarray:
        """Return the number of outputs in each cell, as float64."""
        counts = np.zeros(len(self._cells))
        for output in outputs:
            counts[self._find_cell(output)] += 1
        return counts

    def _find_cell(self, output: TokenTuple) -> int:
        prefixes = (output[:n] for n in range(len(output), -1, -1))
        return next(self._cells[prefix] for prefix in prefixes if prefix in self._cells)


def run_plain_tests(
    trial: SampledTrial, samples_by_prompt: list[list[TokenTuple]], level: float
) -> list[HypothesisTest]:
    """Test whether outputs have the same distribution as plain outputs. Two plain samples are
    generated: the first determines the cells, the second is compared. samples_by_prompt: the
    outputs to test."""
    plain = replace(trial, gamma=0, rule=PLAIN_RULE, label="plain")
    samples = [
        trial.group_by_prompt(
            [x for _, outputs in replace(plain, stream=stream).generate_batches() for x in outputs]
        )
        for stream in (1, 2)
    ]
    tables = [
        (cells.count(ours), cells.count(theirs))
        for cells, ours, theirs in zip(
            map(PrefixCells, samples[0]), samples_by_prompt, samples[1], strict=True
        )
    ]
    name, unit = f"{trial.name}: against plain", "outputs"
    tests = [
        run_two_sample_test(f"{name}, prompt {i}", unit, [table], level)
        for i, table in enumerate(tables)
    ]
    return [*tests, run_two_sample_test(f"{name}, all prompts", unit, tables, level)]
