"""With the keyed randomness that users get: the texts of many rows against the target's own
distribution.

The enumeration proves the distribution given perfect uniforms; this sees the whole, uniforms
included. The seeds are fixed. On other seeds a chi-square here would fail by chance once in a
million times.
"""

from __future__ import annotations

from collections import Counter

import pytest
from scipy import stats

from foretoken.costing.gamma import FixedGamma
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.engine.batch import Batch
from foretoken.request import Request, SequenceState
from foretoken.sampling.acceptance_rules import EXACT_RULES, Outcome, speculative
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.keys import SequenceKey
from foretoken.sampling.verifier import CoupledVerifier, SampledVerifier, Verifier
from oracle import joint, random_model
from running import running
from table import TableModel

V, LENGTH, N, BATCH = 3, 3, 6000, 2000
ALPHA = 1e-6
P, Q = random_model(21, V), random_model(22, V)
TARGET_DISTRIBUTION = joint(lambda text: P((0, *text)), LENGTH)
VERIFIERS = {name: SampledVerifier(rule) for name, rule in EXACT_RULES.items()} | {
    "coupled": CoupledVerifier()
}
DRAFTERS = {
    "lm": lambda: LMDrafter(TableModel(Q, V), V),
    "lookup": lambda: LookupDrafter(),
}


def continuations(drafter, verifier: Verifier, gamma: int) -> Counter[tuple[int, ...]]:
    """Of N rows, `BATCH` at a time: every row has a key of its own."""
    engine = Batch(TableModel(P, V), drafter())
    params = SamplingParams(temperature=1.0)
    texts: Counter[tuple[int, ...]] = Counter()
    for batch in range(N // BATCH):
        keys = [SequenceKey(batch, b) for b in range(BATCH)]
        rows = [
            SequenceState.from_request(Request([0], LENGTH, key, params=params)) for key in keys
        ]
        for _ in running(engine, rows, verifier, FixedGamma(gamma)):
            pass
        texts.update(tuple(row.new_tokens) for row in rows)
    return texts


def p_value(texts: Counter[tuple[int, ...]]) -> float:
    """Chi-square over all texts; those expected fewer than 5 times share a cell."""
    assert sum(texts.values()) == N
    assert set(texts) <= set(TARGET_DISTRIBUTION)
    cells = [(texts[text], N * weight) for text, weight in TARGET_DISTRIBUTION.items()]
    rare = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5]
    if rare:
        cells.append((sum(counts for counts, _ in rare), sum(expected for _, expected in rare)))
    counts, expected = zip(*cells, strict=True)
    return float(stats.chisquare(counts, expected, sum_check=False).pvalue)


@pytest.mark.parametrize(
    ("kind", "gamma", "rule"),
    [
        pytest.param("lm", 0, "speculative", marks=pytest.mark.prove),
        pytest.param("lm", 2, "speculative", marks=pytest.mark.prove),
        ("lm", 2, "block"),
        pytest.param("lm", 0, "coupled", marks=pytest.mark.prove),
        pytest.param("lm", 2, "coupled", marks=pytest.mark.prove),
        ("lookup", 2, "speculative"),  # certain draft tokens: the block's verdicts are the same
    ],
)
def test_texts_have_the_targets_distribution(kind, gamma, rule):
    """Fails by chance for one seed in a million."""
    assert p_value(continuations(DRAFTERS[kind], VERIFIERS[rule], gamma)) > ALPHA


class WithoutResidual(Outcome):
    def compute_next_distribution(self, n):
        return self.p[range(len(n)), n]


def biased(p, q, x, lengths):
    o = speculative(p, q, x, lengths)
    return WithoutResidual(o.survival, o.p, o.q, o.x, o.lengths, o.scale)


def test_a_planted_bias_is_seen():
    """The residual skipped; by chance it would be missed once in 1e20 times."""
    assert p_value(continuations(DRAFTERS["lm"], SampledVerifier(biased), 2)) < 1e-20


def test_rows_of_different_keys_are_independent():
    """Texts of neighbouring rows form a product distribution; fails by chance for one seed in a
    million."""
    engine = Batch(TableModel(P, V), DRAFTERS["lm"]())
    params, keys = SamplingParams(temperature=1.0), [SequenceKey(99, b) for b in range(2 * BATCH)]
    rows = [SequenceState.from_request(Request([0], LENGTH, key, params=params)) for key in keys]
    for _ in running(engine, rows, SampledVerifier(speculative), FixedGamma(2)):
        pass
    table = [[0] * V for _ in range(V)]
    for a, b in zip(rows[::2], rows[1::2], strict=True):
        table[a.new_tokens[1]][b.new_tokens[1]] += 1
    assert stats.chi2_contingency(table).pvalue > ALPHA
