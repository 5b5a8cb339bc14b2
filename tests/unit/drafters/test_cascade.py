"""A drafter within a drafter: whose distribution comes out, what it costs, and what it is told."""

from __future__ import annotations

import pytest

import foretoken
from foretoken.costing.stored_costs import make_identity
from foretoken.drafters.cascade import CascadeDrafter
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.mixture import MixtureDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.drafters.uniform import UniformDrafter
from foretoken.errors import InputError, NumericsError, RefusedError
from foretoken.models.stock.model import CausalModel
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import SequenceKey
from foretoken.speculator import Speculator
from oracle import random_model
from table import TableModel
from tiny import llama, t5

V = 5
P, M, Q = (random_model(seed, V) for seed in (1, 2, 3))
SAMPLED = SamplingParams(temperature=1.0)


def draw(lengths: list[int], params: SamplingParams = SAMPLED) -> Draw:
    return Draw([SequenceKey(0, b) for b in range(len(lengths))], lengths, [params] * len(lengths))


def cascade(gamma: int = 3, **changes) -> CascadeDrafter:
    return CascadeDrafter(TableModel(M, V, **changes), LMDrafter(TableModel(Q, V)), gamma)


def test_the_middle_model_runs_less_than_once_a_draft_token_where_the_inner_drafter_is_right():
    drafter = CascadeDrafter(TableModel(M, V), LMDrafter(TableModel(M, V)), 3)
    drafter.start([0], [[1]], None)
    assert drafter.propose([8], draw([1])).calls == 2  # 3 draft tokens and 1 token of its own each
    plain = CascadeDrafter(TableModel(M, V), NoDrafter())
    plain.start([0], [[1]], None)
    assert plain.propose([8], draw([1])).calls == 8


def test_a_source_is_read_by_a_middle_model_with_an_encoder_and_else_the_head_of_the_text():
    for encoder_decoder in True, False:
        drafter = cascade(encoder_decoder=encoder_decoder)
        drafter.start([0], [[1]], [[3, 4]])
        draft = drafter.propose([1], draw([1]))
        assert draft.q is not None
        assert draft.q[0, 0].tolist() == pytest.approx(M((3, 4, 1)), abs=1e-12)


@pytest.mark.parametrize("encoder_decoder", [False, True])
def test_a_source_of_ids_that_the_middle_model_does_not_know(encoder_decoder):
    """A target's encoder may have a larger vocabulary than its decoder."""
    drafter = cascade(encoder_decoder=encoder_decoder)
    drafter.start([0, 1], [[1], [1]], [[V, 4], [3]])
    assert drafter.propose([2, 2], draw([1, 1])).lengths.tolist() == [0, 2]


def test_a_source_that_the_middle_models_encoder_cannot_hold():
    drafter = cascade(encoder_decoder=True)
    drafter.middle.source_context = 2
    drafter.start([0, 1], [[1], [1]], [[3, 4, 2], [3]])
    assert drafter.propose([2, 2], draw([1, 1])).lengths.tolist() == [0, 2]
    with pytest.raises(RefusedError, match="cannot draft for a decoder-only target"):
        cascade(encoder_decoder=True).start([0], [[1]], None)


def test_what_cannot_be_a_cascade():
    with pytest.raises(
        InputError, match="^UniformDrafter has a vocabulary of 7 tokens, .* has 5; give"
    ):
        CascadeDrafter(TableModel(M, V), UniformDrafter(7))
    for gamma in -1, 2.5, float("nan"), "3", None, True:
        with pytest.raises(InputError, match=f"^gamma is {gamma!r}; give "):
            CascadeDrafter(TableModel(M, V), NoDrafter(), gamma)
    with pytest.raises(InputError, match="^Speculator.* is not a model; give .*\\.target$"):
        CascadeDrafter(Speculator(TableModel(M, V), NoDrafter()), NoDrafter())


def test_bad_logits_are_said_to_be_the_middle_models():
    drafter = CascadeDrafter(TableModel(lambda text: [float("nan")] * V, V), NoDrafter())
    drafter.start([0], [[1]], None)
    with pytest.raises(NumericsError, match="^in a cascade's middle model.* hold NaN at position"):
        drafter.propose([2], draw([1]))


def test_costs_of_a_cascade_are_not_kept_for_another():
    lookup = LookupDrafter()
    assert make_identity(lookup) is not None
    assert make_identity(CascadeDrafter(TableModel(M, V), lookup)) is None
    named = TableModel(M, V)
    named.identity = "table"
    assert make_identity(LMDrafter(named)) == "table"
    assert make_identity(LMDrafter(named, params=SAMPLED)) is None


# Through the face of the package


def spec(**options) -> Speculator:
    """A cascade of depth 3 in float64: each model accelerated by the next."""
    models = [llama(64, seed=seed).double() for seed in (3, 4, 5)]
    small = foretoken.load(models[2], "lookup")
    return foretoken.load(models[0], foretoken.load(models[1], small))


def test_what_load_returned_may_draft():
    speculator = spec()
    assert isinstance(speculator.drafter, CascadeDrafter)
    assert isinstance(speculator.drafter.drafter, CascadeDrafter)
    assert speculator.draft_name.startswith(
        "LlamaForCausalLM drafted for by LlamaForCausalLM drafted"
    )
    prompts = [[1, 2, 3], [4], [5, 6, 5, 6, 5]]
    plain = foretoken.load(speculator.target.model, "none").generate(prompts, max_new_tokens=30)
    fast = speculator.generate(prompts, max_new_tokens=30, gamma=4)
    assert [c.tokens for c in fast] == [c.tokens for c in plain]
    assert sum(c.stats.drafted for c in fast) > 0


def test_in_coupled_mode_the_middle_model_meets_the_targets_noise():
    options = {"max_new_tokens": 30, "temperature": 1.0, "gamma": 4, "rule": "coupled", "seed": 3}
    speculator, prompts = spec(), [[1, 2, 3], [4]]
    plain = speculator.generate(prompts, **options | {"gamma": 0})
    assert [c.tokens for c in speculator.generate(prompts, **options)] == [c.tokens for c in plain]
    same = Speculator(
        speculator.target, CascadeDrafter(CausalModel(speculator.target.model), LookupDrafter())
    )
    parts = [(LMDrafter(CausalModel(speculator.target.model)), most) for most in (1, None)]
    for each in same, Speculator(speculator.target, MixtureDrafter(parts)):
        again = each.generate(prompts, **options)
        assert [c.tokens for c in again] == [c.tokens for c in plain]
        assert all(c.stats.accepted == c.stats.drafted for c in again)
        assert all(c.stats.alpha == pytest.approx(1) for c in again)


def test_vocabularies_are_compared_at_load():
    with pytest.raises(RefusedError, match="has 32 output rows and the target 64"):
        foretoken.load(llama(64), foretoken.load(llama(32), "lookup"))
    with pytest.raises(
        InputError, match="^UniformDrafter has a vocabulary of 7 tokens, but the target has"
    ):
        foretoken.load(llama(64), UniformDrafter(7))
    with pytest.raises(RefusedError, match="is an encoder-decoder, which cannot draft"):
        foretoken.load(llama(64), foretoken.load(t5(64), "lookup"))
