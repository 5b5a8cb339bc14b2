"""Measuring: against a pair whose alpha is known, and what is saved of it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from foretoken.costing.contention import Taken
from foretoken.drafters.base import Drafter
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.errors import InputError
from foretoken.generation_config import Ends
from foretoken.measurement.measure import PASSES, digest, measure
from foretoken.measurement.plan import predictions
from foretoken.measurement.result import Measurement, MeasureOptions, load
from foretoken.speculator import Speculator
from table import TableModel

V, TOKENS = 5, 12
random = np.random.default_rng(3)
P, Q = random.dirichlet(np.ones(V), V), random.dirichlet(np.ones(V), V)
PROMPTS = [[i % V] for i in range(24)]


def options(prompts=PROMPTS, **settings) -> MeasureOptions:
    settings = {"temperature": 1.0, "gamma": 3, "max_new_tokens": TOKENS} | settings
    return MeasureOptions("target", "draft", "prompts.txt", digest(prompts), **settings)


def pair(drafter: Drafter | None = None, **settings) -> Speculator:
    draft = LMDrafter(TableModel.markov(Q.tolist()), V) if drafter is None else drafter
    return Speculator(TableModel.markov(P.tolist()), draft, **settings)


def exact_alpha() -> float:
    """E sum min(p, q) over the first TOKENS prefixes that P makes of every prompt."""
    overlap, distributions = np.minimum(P, Q).sum(1), np.eye(V)[[prompt[0] for prompt in PROMPTS]]
    estimates = []
    for _ in range(TOKENS):
        estimates.append((distributions @ overlap).mean())
        distributions = distributions @ P
    return float(np.mean(estimates))


@pytest.fixture(scope="module")
def found() -> Measurement:
    return measure(pair(), PROMPTS, options())


def test_alpha_holds_the_truth(found):
    """Fixed seeds; of all seeds 5 % would fail."""
    truth = exact_alpha()
    assert found.alpha.low < truth < found.alpha.high
    assert found.alpha.error < 0.1
    assert found.alpha_in_loop.low < found.alpha_in_loop.value < found.alpha_in_loop.high


def test_counts_agree_with_one_another(found):
    steps = [step for one in found.prompts for step in one.loop.steps]
    assert sum(p.kept for p in found.positions) == sum(step.accepted for step in steps)
    assert sum(p.judged for p in found.positions) == sum(step.judged for step in steps)
    first, *others = found.positions
    assert first.asked == sum(step.gamma > 0 for step in steps)
    for before, one in zip(found.positions, others, strict=False):
        assert one.kept <= one.judged <= one.asked <= before.kept
    assert all(p.offered == 1 for p in found.positions)
    assert found.tokens == TOKENS and found.silent == 0
    timed = sum(one.loop.tokens for one in found.prompts)  # behind the first steps
    assert sum(step.kept for step in steps) == timed < 24 * TOKENS
    assert found.tokens_per_call.value == pytest.approx(timed / len(steps))


def test_costs(found):
    assert len(found.passes) == PASSES and found.passes[0].n == 24 and found.v[0] == 1
    assert found.context == 1 + TOKENS // 2
    plain = [step.score_seconds for one in found.prompts for step in one.plain.steps]
    assert found.plain_pass.median == pytest.approx(np.median(plain))
    assert found.c == pytest.approx(found.draft_seconds.median / np.median(plain))
    assert found.draft_seconds.median > 0 and found.plain_overhead.median > 0
    assert found.c_hat is None  # a table has no parameters
    assert found.speedup.low < found.speedup.value < found.speedup.high
    steps = [step for one in found.prompts for step in one.loop.steps if step.drafted]
    times = [step.draft_seconds / step.drafted for step in steps]
    assert found.draft_seconds.median == pytest.approx(np.median(times))


def test_predictions_follow_from_the_counts(found):
    table = predictions(found)
    rates = [p.kept / p.asked for p in found.positions]
    assert table[2].tokens_per_call == pytest.approx(1 + rates[0] + rates[0] * rates[1])
    s3, s4 = (table[g].tokens_per_call - table[g - 1].tokens_per_call for g in (3, 4))
    assert s4 == pytest.approx(s3 * found.alpha.value)  # beyond what was measured
    assert [one.gamma for one in table] == list(range(PASSES))
    assert table[0].speedup.value == 1 and table[0].speedup.error == 0
    assert asdict(table[3].speedup) == pytest.approx(asdict(found.speedup))  # gamma 3 was run


def test_a_perfect_and_a_useless_draft():
    perfect = pair(LMDrafter(TableModel.markov(P.tolist()), V))
    measurement = measure(perfect, PROMPTS[:3], options(max_new_tokens=10, gamma=2))
    assert measurement.alpha.value == pytest.approx(1) and measurement.tokens_per_call.value == 3
    assert [p.kept / p.judged for p in measurement.positions] == [1, 1]
    left, right = np.array([0.5, 0.5, 0, 0, 0]), np.array([0, 0, 0.5, 0.5, 0])
    useless = Speculator(
        TableModel.markov([left] * V), LMDrafter(TableModel.markov([right] * V), V)
    )
    measurement = measure(useless, PROMPTS[:3], options(max_new_tokens=9, gamma=2))
    assert measurement.alpha.value == 0 and measurement.tokens_per_call.value == 1
    assert measurement.positions[1].judged == measurement.positions[1].asked == 0


def test_a_draft_that_is_silent_at_times():
    measurement = measure(pair(LookupDrafter()), PROMPTS[:4], options())
    assert 0 < measurement.silent < 1 and 0 < measurement.positions[0].offered < 1
    assert measurement.positions[0].judged < measurement.positions[0].asked
    assert measurement.draft.runtime == "python" and measurement.draft.operations == 0


def test_an_end_of_sequence_is_no_rejection():
    spec = pair(LMDrafter(TableModel.markov(P.tolist()), V), ends=Ends(eos=frozenset({0})))
    measurement = measure(spec, PROMPTS[1:5], options())
    assert all(p.kept == p.judged == p.asked for p in measurement.positions)
    assert measurement.tokens < TOKENS


def test_an_encoder_decoder():
    def distribution(text):
        return P[text[-1]].tolist()

    target = TableModel(distribution, V, encoder_decoder=True)
    drafter = LMDrafter(TableModel(distribution, V), V)
    spec = Speculator(target, drafter, ends=Ends(decoder_start=0))
    measurement = measure(spec, PROMPTS[:3], options())
    assert measurement.target.encoder_decoder and measurement.alpha.value == pytest.approx(1)


def test_a_small_context():
    target = TableModel(lambda text: P[text[-1]].tolist(), V, context=9)
    spec = Speculator(target, LMDrafter(TableModel.markov(Q.tolist()), V))
    measurement = measure(spec, PROMPTS[:3], options())
    assert len(measurement.passes) == 9 and measurement.context == 0


def test_what_cannot_be_measured():
    with pytest.raises(InputError, match="temperature is -1.0"):
        measure(pair(), PROMPTS, options(temperature=-1.0))
    with pytest.raises(InputError, match="guesses nothing"):
        measure(pair(NoDrafter()), PROMPTS, options())
    with pytest.raises(InputError, match="prompt 1 holds the id 9"):
        measure(pair(), [[1], [9]], options())


def test_an_interruption_is_none_of_its_results():
    class Impatient(TableModel):
        left = 60

        def score(self, blocks, need):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return super().score(blocks, need)

    spec = Speculator(Impatient(lambda text: P[text[-1]].tolist(), V), pair().drafter)
    with pytest.raises(KeyboardInterrupt):
        measure(spec, PROMPTS, options())


# What is saved


def test_a_file_is_read_as_it_was_written(found, tmp_path):
    found.save(tmp_path / "m.json")
    assert load(tmp_path / "m.json") == found
    assert [path.name for path in tmp_path.iterdir()] == ["m.json"]


def test_what_other_processes_took_is_summed_over_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = iter([Taken(0.5, 1.0)] * 2 + [Taken(-0.1, 1.0)] * 2)
    monkeypatch.setattr("foretoken.costing.contention.taken", lambda since: next(spans))
    both = measure(pair(), PROMPTS[:4], options(PROMPTS[:4]))
    assert both.others == 0.2
    assert [one.taken.others for one in both.prompts] == [0.5] * 2 + [-0.1] * 2
    both.save(tmp_path / "m.json")
    assert load(tmp_path / "m.json") == both
