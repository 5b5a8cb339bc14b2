"""The certificate passes honest pairs and finds the bugs that other systems have shipped.

Each bug is planted in the same small world. Seeds are fixed; on other seeds an honest pair would
fail one certificate in 10,000, and no bug planted here would be missed once in a million.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import pairs
from exact.drafters import Certain, Dropper, FunctionDrafter, GreedyClaimsDistribution, RoundedClaim
from foretoken import load
from foretoken.certificate.certify import MAX_SAMPLED_PROMPTS, Certificate, CertificatePlan, certify
from foretoken.certificate.greedy_identity import measure_shape_noise
from foretoken.certificate.planted_bugs import ArgmaxDrafter, break_rule
from foretoken.certificate.sampled_trial import UNBATCHED_STRIDE, SampledTrial
from foretoken.certificate.watched_drafter import WatchedDrafter
from foretoken.drafters.base import widen
from foretoken.drafters.cascade import CascadeDrafter
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.uniform import UniformDrafter
from foretoken.errors import InputError, RefusedError
from foretoken.sampling.acceptance_rules import Outcome, block, speculative
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import Purpose
from foretoken.speculator import Speculator
from oracle import random_model
from pairdrafts import eagle_file, pairs_drafter
from pairs import relative, target
from table import TableModel

V = 6
P, Q = random_model(31, V), random_model(32, V)
PROMPTS = [[0], [3, 1]]
PLAN = CertificatePlan(
    gamma=2, num_samples=64, num_greedy_tokens=16, distributions=(SamplingParams(1.0),)
)


def issue(drafter=None, target=None, prompts=PROMPTS, **changes) -> Certificate:
    spec = Speculator(target or TableModel(P, V), drafter or FunctionDrafter(Q))
    return certify(spec, prompts, replace(PLAN, **changes))


@pytest.mark.daily("block", "model")
@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        (lambda: FunctionDrafter(Q), "speculative"),
        (lambda: FunctionDrafter(Q), "block"),
        (lambda: Certain(Q), "block"),
        (lambda: LMDrafter(TableModel(Q, V), V), "block"),
    ],
    ids=["speculative", "block", "certain", "model"],
)
def test_honest_pairs_pass(drafter, rule):
    certificate = issue(drafter(), rule=rule)
    assert certificate.verdict == "lossless"
    assert certificate.greedy_tokens == 96 and not certificate.differences
    assert certificate.shapes.noise == 0 and certificate.guesses > 150
    least = min(control.p_value for control in certificate.controls if control.p_value is not None)
    assert least < 1e-20  # the controls are not found by luck


@pytest.mark.parametrize("kind", [pytest.param("uniform", marks=pytest.mark.prove), "cascade"])
def test_a_weak_draft_in_coupled_mode_passes(kind):
    """What is guessed again after a rejection is guessed by the same noise: no new number."""
    wide = 40
    distribution, drafter = random_model(31, wide), UniformDrafter(wide)
    if kind == "cascade":
        drafter = CascadeDrafter(TableModel(random_model(32, wide), wide), drafter)
    gamma, texts = (7, 128) if kind == "uniform" else (4, 48)
    certificate = issue(
        drafter, TableModel(distribution, wide), rule="coupled", gamma=gamma, num_samples=texts
    )
    assert certificate.verdict == "lossless"
    (counted,) = {test.n for test in certificate.tests if test.of == "draft tokens"}
    places = len(PROMPTS) * texts * (2 * gamma + 1)
    assert places / 4 < counted <= places < certificate.guesses  # at most once a place


def test_a_liar_in_coupled_mode_is_found():
    assert issue(OwnDice(Q), rule="coupled").verdict == "not lossless"


def test_one_prompt_is_a_list_of_one():
    one, listed = (issue(prompts=prompts, num_samples=16) for prompts in ([3, 1], [[3, 1]]))
    assert one == listed and one.prompts == 1


def test_more_prompts_than_are_sampled():
    """Greedy text is compared on all of them, sampled text and controls keep to the first ones."""
    prompts = [[i % V, i // V] for i in range(MAX_SAMPLED_PROMPTS + 10)]
    certificate = issue(prompts=prompts, num_samples=16)
    assert certificate.verdict == "lossless" and certificate.prompts == len(prompts)
    assert {test.n for test in certificate.tests if test.of == "tokens"} == {
        MAX_SAMPLED_PROMPTS * 16 * PLAN.num_new_tokens
    }


def test_every_distribution_is_certified():
    distributions = (SamplingParams(1.0), SamplingParams(0.7, top_k=3))
    certificate = issue(distributions=distributions, num_samples=48)
    assert certificate.verdict == "lossless"
    assert (
        sum(test.name.startswith("temperature 0.7, top-k 3: ") for test in certificate.tests) == 9
    )


def upside_down(p, q, x, lengths):
    """Accepts with q/p."""
    o = speculative(p, q, x, lengths)
    if q is None:  # there was no draft token
        return o
    px, qx = (
        distribution.gather(2, x[..., None]).squeeze(2).double()
        for distribution in (p[:, : x.shape[1]], q)
    )
    ratio = torch.where(px > 0, (qx / px).clamp(max=1.0), 1.0)
    return replace(o, survival=ratio.where(o.survival > 0, 0.0).cumprod(1))


def with_next(distribution: Callable[[Outcome, Tensor], Tensor]):
    """Block verification whose next token has another distribution."""

    class Wrong(Outcome):
        def compute_next_distribution(self, n: Tensor) -> Tensor:
            return distribution(self, n)

    def rule(p, q, x, lengths):
        o = block(p, q, x, lengths)
        return Wrong(o.survival, o.p, o.q, o.x, o.lengths, o.scale)

    return rule


def rows(o: Outcome) -> Tensor:
    return torch.arange(len(o.x))


def likeliest(o: Outcome, n: Tensor) -> Tensor:
    return torch.eye(V).double()[Outcome.compute_next_distribution(o, n).argmax(-1)]


def early_bonus(o: Outcome, n: Tensor) -> Tensor:
    """Where all draft tokens were kept, the distribution of the last of them again."""
    late = (n == o.lengths) & (n > 0)
    return torch.where(
        late[:, None], o.p[rows(o), (n - 1).clamp(min=0)], Outcome.compute_next_distribution(o, n)
    )


BROKEN_RULES = {
    "ratio upside down": upside_down,
    "replacement from the wrong position": break_rule(block),
    "replacement from another row": with_next(
        lambda o, n: Outcome.compute_next_distribution(o, n).roll(1, 0)
    ),
    "residual left out": with_next(lambda o, n: o.p[rows(o), n]),
    "argmax instead of a sample": with_next(likeliest),
    "bonus from the wrong position": with_next(early_bonus),
}


@pytest.mark.prove
@pytest.mark.parametrize("name", BROKEN_RULES)
def test_a_broken_rule_is_found(name):
    certificate = issue(rule=BROKEN_RULES[name], num_samples=128)
    assert certificate.verdict == "not lossless"
    assert min(test.p_value for test in certificate.failed) < 1e-8


@pytest.mark.daily("RoundedClaim")
@pytest.mark.parametrize("liar", [GreedyClaimsDistribution, RoundedClaim, Dropper])
def test_a_drafter_that_lies_is_found(liar):
    assert issue(liar(Q)).verdict == "not lossless"


def test_a_rounded_q_is_named():
    certificate = issue(RoundedClaim(Q))
    assert (
        "sampled from another distribution than the q reported, total variation 0.0"
        in certificate.lies[0]
    )


class OwnDice(GreedyClaimsDistribution):
    """Draws by its own means, from a distribution that is sharper than the one it reports."""

    def choose(self, q: Tensor, i: int, draw: Draw) -> list[int]:
        return torch.multinomial(q**2, 1, generator=self.dice)[:, 0].tolist()

    dice = torch.Generator().manual_seed(0)


class Undecided(Certain):
    """Draws, and reports its draft tokens as certain."""

    def choose(self, q: Tensor, i: int, draw: Draw) -> list[int]:
        return draw(q, i).tolist()


def test_other_lies_are_found():
    assert any("draft tokens under q" in test.name for test in issue(OwnDice(Q)).failed)
    assert "both reported as certain" in issue(Undecided(Q)).lies[0]


@pytest.mark.parametrize(
    ("drafter", "changes"),
    [
        (lambda: FunctionDrafter(P), {"gamma": 1}),
        pytest.param(lambda: FunctionDrafter(Q), {"num_samples": 320}, marks=pytest.mark.prove),
    ],
    ids=["bonus", "residual"],
)
def test_noise_that_is_used_twice_is_found(drafter, changes, monkeypatch):
    """The next token is drawn with the number of the first draft token."""

    def again(self: Draw, distribution: Tensor) -> Tensor:
        return self._draw_ids(distribution, 0, Purpose.DRAFT)

    monkeypatch.setattr(Draw, "draw_next_token", again)
    certificate = issue(drafter(), **changes)
    assert min(test.p_value for test in certificate.failed) < 1e-8


class NoPenalty(TableModel):
    """Bans a repetition of the last token, but within a block forgets it."""

    def score(self, blocks, need: list[int]) -> Tensor:
        logits = super().score(blocks, need)
        for b, new in enumerate(blocks):
            if len(new) == 1:
                logits[b, 0, new[0]] -= 2.0
        return logits


class OneTooMany(TableModel):
    """Rolls back to one token too many, where there is one."""

    def set_lengths(self, lengths: list[int]) -> None:
        pairs = zip(self._texts, lengths, strict=True)
        super().set_lengths([min(len(text), length + 1) for text, length in pairs])


class OffAlone(TableModel):
    """Says at each place what belongs to the place before, where a row is by itself."""

    def score(self, blocks, need: list[int]) -> Tensor:
        logits = super().score(blocks, need)
        return logits.roll(1, 1) if len(need) == 1 and need[0] > 1 else logits


def test_a_bug_of_single_rows_is_found():
    certificate = issue(target=OffAlone(P, V), num_samples=16)
    assert not certificate.shapes.ok and any(
        one.verdict == "bug" for one in certificate.differences
    )


def test_texts_of_every_prompt_are_sampled_alone():

    def tokens(model: TableModel) -> list[list[int]]:
        spec, params = Speculator(model, FunctionDrafter(Q)), SamplingParams(1.0)
        trial = SampledTrial(spec, PROMPTS, params, 2, "block", 64, 6, seed=0)
        return [tokens for _, batch in trial.generate_batches() for tokens in batch]

    pairs = enumerate(zip(tokens(TableModel(P, V)), tokens(OffAlone(P, V)), strict=True))
    alone = {k % 2 for k, (a, b) in pairs if a != b and k % UNBATCHED_STRIDE == 0}
    assert alone == {0, 1}


class HalfOff(TableModel):
    """The logits of a block are off by a half, in float32."""

    compute_dtype = "float32"

    def score(self, blocks, need: list[int]) -> Tensor:
        logits = super().score(blocks, need).float()
        logits[:, 1:, 0] += 0.5
        return logits


def test_the_tolerance_is_that_of_the_computation():
    certificate = issue(target=HalfOff(P, V), num_samples=16)
    assert certificate.shapes.dtype == "float32" and certificate.shapes.allowed < 1e-3
    assert not certificate.shapes.ok
    for dtype in (torch.float32, torch.bfloat16):
        model = deepcopy(target("Llama")).to(dtype)  # others share the target
        spec = load(model, relative(model), dtype="auto", runtime="transformers")
        shapes = measure_shape_noise(
            spec.target,
            spec.inputs.make_requests([[1, 2, 3]], SamplingParams(max_new_tokens=4), 0),
            [[4, 5, 6, 7]],
            3,
        )
        assert shapes.dtype == str(dtype).removeprefix("torch.") and shapes.ok


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (SamplingParams(1.0, top_p=0.7), "temperature 1, top-p 0.7: "),
        (SamplingParams(1.0, top_k=4, min_p=0.2), "temperature 1, top-k 4, min-p 0.2: "),
    ],
)
def test_every_warper_reaches_the_texts(params, name):
    certificate = issue(distributions=(params,))
    assert certificate.verdict == "lossless" and all(
        test.name.startswith(name) for test in certificate.tests
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distributions": ()}, "distributions is empty; give one or more"),
        (
            {"distributions": (SamplingParams(),)},
            "temperature is 0.0 in one of distributions; give",
        ),
        ({"num_samples": 16.5}, "num_samples is 16.5; give a whole number"),
        ({"seed": -1}, "seed is -1"),
        ({"gamma": None}, "gamma is None; give 1 or more"),
    ],
)
def test_mistakes_in_a_plan(changes, message):
    with pytest.raises(InputError, match=re.escape(message)):
        CertificatePlan(**changes)


@pytest.mark.parametrize("model", [OneTooMany, pytest.param(NoPenalty, marks=pytest.mark.prove)])
def test_a_model_that_reads_blocks_otherwise_is_found(model):
    certificate = issue(target=model(P, V), num_samples=128)
    assert certificate.verdict == "not lossless" and not certificate.shapes.ok
    assert min(test.p_value for test in certificate.failed) < 1e-8  # sampled text shows it too
    assert any(one.verdict == "bug" for one in certificate.differences)


def test_a_certificate_that_finds_no_planted_bug_is_void():
    """Distributions that do not depend on the position hide a replacement from the wrong one."""
    p = torch.full((2,), 0.5).double().tolist()
    certificate = issue(
        target=TableModel(lambda text: p, 2), drafter=FunctionDrafter(lambda text: p), prompts=[[0]]
    )
    assert certificate.verdict == "void"


@pytest.mark.prove
def test_an_encoder_decoder_pair_passes():
    model = target("T5")
    spec = load(model, relative(model))
    certificate = certify(spec, pairs.PROMPTS[:2], replace(PLAN, num_samples=96))
    assert certificate.verdict == "lossless" and certificate.guesses > 400
    assert certificate.tests[0].n == 2 * 96 * PLAN.num_new_tokens


def over_states(kept: list[int] | None) -> Certificate:
    """Of a draft as EAGLE-3's: the controls' target shows its states, too."""
    network = target("Llama")
    own = eagle_file(network.config.vocab_size, (0, 1, 2), kept, norm_output=True).read(network)
    drafter = pairs_drafter(network, own)
    drafter.target.expose_hidden_states(drafter.count_cached_tokens)
    spec = Speculator(drafter.target, drafter)
    return certify(spec, pairs.PROMPTS[:2], replace(PLAN, num_samples=48))


SOME = [0, 2, 3, 5, 9]  # of the target's ids


@pytest.mark.daily("kept1")
@pytest.mark.parametrize("kept", [None, SOME])
def test_drafts_over_the_targets_states_pass(kept):
    certificate = over_states(kept)
    assert certificate.verdict == "lossless" and all(
        control.found for control in certificate.controls
    )


@pytest.mark.daily("q")
@pytest.mark.parametrize("lie", ["tokens", "q"])
def test_draft_tokens_under_other_ids_than_their_q_show(lie, monkeypatch):
    def drawn(draw, logits, i, ids, V, params=None):
        tokens, q = draw.sample(logits, i, params)
        other = ids.roll(1)
        return (other if lie == "tokens" else ids)[tokens], widen(
            q, ids if lie == "tokens" else other, V, missing=0.0
        )

    monkeypatch.setattr("foretoken.drafters.pairs.draw_token", drawn)
    assert over_states(SOME).verdict == "not lossless"


class Bound(FunctionDrafter):
    """Reads the states of one target, and cannot be given another."""

    reads_target = True

    def __init__(self, target: TableModel) -> None:
        super().__init__(Q)
        self.target = target


def test_a_drafter_bound_to_its_target_is_refused():
    model = TableModel(P, V)
    with pytest.raises(RefusedError, match=r"define a method with_target\(target\)"):
        issue(Bound(model), model)


def test_what_watches_a_drafter_holds_it():
    """So that a drafter in two places, or of another target, is refused as ever."""
    drafter = FunctionDrafter(Q)
    for wrapper in (WatchedDrafter(drafter, 0), ArgmaxDrafter(drafter)):
        assert list(wrapper.holds) == [drafter]


def test_a_draft_that_hardly_guesses_is_not_certified():
    """On so few draft tokens a planted bug cannot be seen, and the certificate says so."""
    certificate = certify(
        load(target("T5"), "lookup"), pairs.PROMPTS[:1], replace(PLAN, num_samples=32)
    )
    assert certificate.verdict == "void" and certificate.guesses < 100
