"""Assistants of Gemma 4, the whole way through `generate`: the distribution of sampled texts, which
with transformers 5.23 is not the target's (transformers #47932).

The exact distribution comes from full forwards in float64. Seeds are fixed; on other seeds each
chi-square here would fail by chance about once in a million times.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

import assistants
import oracle
import pairs
from foretoken import SamplingParams
from foretoken.speculator import Speculator

ALPHA = 1e-6
V, LENGTH, N = 12, 3, 3000
PROMPT = [3, 7, 1, 9, 4]
PLAIN = SamplingParams(temperature=1.0)
CUT = SamplingParams(temperature=0.8, top_p=0.9)


@pytest.mark.prove
@pytest.mark.parametrize("params", [CUT, PLAIN])
@pytest.mark.parametrize("rule", ["block", "speculative"])
def test_texts_have_the_exact_distribution(params: SamplingParams, rule: str) -> None:
    """Fails by chance for one seed in a million."""
    net = assistants.target(V)

    def distribution(text: oracle.Text):
        logits = pairs.scores(net, [*PROMPT, *text])[-1].numpy()
        return oracle.standardize(logits, params.temperature, params.top_k, params.top_p)

    model = assistants.running(net)
    drafter = assistants.drafter(model, assistants.network(V, ordered=True))
    found = Speculator(target=model, drafter=drafter).generate(
        [PROMPT] * N, replace(params, max_new_tokens=LENGTH), gamma=2, rule=rule, seed=3
    )
    steps = [record for text in found for record in text.steps]
    assert any(record.accepted for record in steps)
    assert any(record.accepted < record.drafted for record in steps)
    texts = Counter(tuple(text.tokens) for text in found)
    assert oracle.p_value(texts, oracle.joint(distribution, LENGTH)) > ALPHA
