"""Logits to distribution to token: against transformers' own warpers, and against a naive inverse
CDF."""

from __future__ import annotations

import math

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from foretoken.errors import NumericsError
from foretoken.sampling.distributions import (
    SamplingParams,
    argmax_ids,
    compute_cdf,
    find_peaks,
    find_possible,
    locate,
    probabilities,
    require_valid_logits,
    sample,
    warp_by_tensors,
)
from oracle import inverse_cdf

COMBINATIONS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.5),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=0.8, top_k=7),
    SamplingParams(temperature=1.0, top_k=1000),  # more than there are
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.4, top_p=1e-6),  # the likeliest stays
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=1.0, min_p=1.0),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.8),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.95, min_p=0.02),
    SamplingParams(temperature=1.7, top_p=0.95, min_p=0.1),
]
CUT = [
    SamplingParams(temperature=1.0, typical_p=0.9),
    SamplingParams(temperature=1.3, typical_p=0.2),
    SamplingParams(temperature=1.0, typical_p=1e-6),
    SamplingParams(temperature=1.0, epsilon_cutoff=0.02),
    SamplingParams(temperature=1.0, epsilon_cutoff=0.999),  # the likeliest stays
    SamplingParams(temperature=1.0, eta_cutoff=0.02),
    SamplingParams(temperature=2.0, eta_cutoff=0.9),
    SamplingParams(temperature=0.8, top_k=12, typical_p=0.7),
    SamplingParams(temperature=0.8, top_p=0.9, epsilon_cutoff=0.03),
    SamplingParams(temperature=0.5, min_p=0.05, eta_cutoff=0.05),
    SamplingParams(1.4, 30, 0.95, 0.01, typical_p=0.8, epsilon_cutoff=0.01, eta_cutoff=0.02),
]


def transformers_distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.typical_p is not None:
        warpers.append(TypicalLogitsWarper(params.typical_p))
    if params.epsilon_cutoff is not None:
        warpers.append(EpsilonLogitsWarper(params.epsilon_cutoff))
    if params.eta_cutoff is not None:
        warpers.append(EtaLogitsWarper(params.eta_cutoff))
    return warpers(torch.zeros(len(logits), 1, dtype=torch.long), logits).softmax(-1)


def alike(p, expected):
    """Mass on the same ids, and as much but for the order of float32's sums."""
    relative = 0 if p.dtype == torch.float64 else 1e-5
    same = torch.allclose(p, expected, atol=relative * 1e-7, rtol=relative)
    return torch.equal(p > 0, expected > 0) and same


@pytest.mark.parametrize("params", COMBINATIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distribution_is_that_of_transformers(params, dtype):
    logits = torch.randn(40, 50, generator=torch.manual_seed(1), dtype=dtype) * 3
    before = logits.clone()
    p = probabilities(logits, params)
    assert p.dtype == dtype and torch.equal(logits, before)
    assert alike(p, transformers_distribution(logits, params))


@pytest.mark.parametrize("params", CUT, ids=str)
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_typical_epsilon_and_eta_are_those_of_transformers(params, spread):
    """In their order, and where controls have left some ids impossible; for every position alone
    as for all at once."""
    logits = torch.randn(40, 50, generator=torch.manual_seed(1), dtype=torch.float64) * spread
    logits[20:, ::3] = -math.inf
    p = probabilities(logits, params)
    torch.testing.assert_close(p, transformers_distribution(logits, params), atol=1e-12, rtol=0)
    wide = probabilities(logits, SamplingParams(params.temperature))
    assert ((p > 0) <= (wide > 0)).all() and not torch.equal(p > 0, wide > 0)
    assert torch.equal(p, probabilities(logits.reshape(8, 5, 50), params).reshape(40, 50))
    assert torch.equal(p[7:8], probabilities(logits[7:8], params))


def test_cuts_that_are_off():
    logits = torch.randn(9, 50, generator=torch.manual_seed(1))
    off = SamplingParams(1.0, typical_p=1.0, epsilon_cutoff=0.0, eta_cutoff=0)
    assert torch.equal(probabilities(logits, off), probabilities(logits, SamplingParams(1.0)))


@pytest.mark.parametrize("params", COMBINATIONS, ids=str)
def test_distribution_with_ties_is_that_of_transformers(params):
    """Ties at the edge of top-k are all kept; the distribution of a position does not depend on the
    rest.

    At the edge of top-p transformers keeps as many, but whichever an unstable sort puts last.
    """
    logits = torch.randint(0, 4, (40, 50), generator=torch.manual_seed(3)).float()
    p, theirs = probabilities(logits, params), transformers_distribution(logits, params)
    if params.top_p == 1:
        assert torch.equal(p, theirs)
    torch.testing.assert_close(p.sort(-1).values, theirs.sort(-1).values, atol=1e-7, rtol=0)
    assert torch.equal(p, probabilities(logits.reshape(8, 5, 50), params).reshape(40, 50))
    assert torch.equal(p[7:8], probabilities(logits[7:8], params))


def test_mass_that_is_top_p_exactly_suffices():
    params = SamplingParams(temperature=1.0, top_p=0.5)
    p = probabilities(torch.zeros(1, 4), params)
    assert int((p > 0).sum()) == 2
    assert torch.equal(p, transformers_distribution(torch.zeros(1, 4), params))


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 9e-6])
def test_greedy_is_one_hot_on_the_first_of_the_likeliest(temperature):
    params = SamplingParams(temperature, top_k=3, top_p=0.5, min_p=0.9)  # none of them matters
    assert params.greedy
    p = probabilities(torch.tensor([[1.0, 5.0, 5.0, 0.0], [2.0, 2.0, 2.0, 2.0]]), params)
    assert p.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


def test_one_threshold_of_greed():
    assert not SamplingParams(temperature=1e-5).greedy
    p = probabilities(torch.tensor([[0.0, 1e-5]]), SamplingParams(temperature=1e-5))
    assert p[0].tolist() == pytest.approx([1 / (1 + math.e), math.e / (1 + math.e)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_half_precision_logits_give_float32_distributions(dtype, temperature):
    logits = torch.randn(5, 9, generator=torch.manual_seed(4)).to(dtype)
    params = SamplingParams(temperature)
    p = probabilities(logits, params)
    assert p.dtype == torch.float32
    # not one operation in half precision
    assert torch.equal(p, probabilities(logits.float(), params))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_likeliest_is_the_first_of_equals(dtype):
    logits = torch.randint(0, 4, (5, 6, 300), generator=torch.manual_seed(12)).to(dtype)
    best = argmax_ids(logits)
    assert best.dtype == torch.int64
    for row, i in zip(logits.flatten(0, 1).tolist(), best.flatten().tolist(), strict=True):
        assert i == row.index(max(row))
    assert argmax_ids(logits[0, 0]).item() == best[0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_peaks_are_the_likeliest_and_show_what_is_invalid(dtype):
    logits = torch.randn(2, 4, 300, generator=torch.manual_seed(3)).to(dtype)
    logits[0, 1, 7], logits[0, 2, 9], logits[1, 0] = math.nan, math.inf, -math.inf
    ids, tops = find_peaks(logits)
    assert math.isnan(tops[0][1]) and tops[0][2] == math.inf and tops[1][0] == -math.inf
    valid = torch.isfinite(torch.tensor(tops))
    assert valid.sum() == 5
    assert torch.equal(torch.tensor(ids)[valid], argmax_ids(logits)[valid])
    assert torch.equal(torch.tensor(tops)[valid], logits.amax(-1)[valid].float())
    assert find_peaks(logits[..., :20])[0] == find_peaks(logits, 20)[0]


UNIFORMS = [0.0, 5e-324, 1e-17, 0.1, 0.25, 0.5, 0.75, 1 - 2**-24, 1 - 2**-53]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("u", UNIFORMS)
def test_sample_is_the_inverse_cdf(u, dtype):
    generator = torch.manual_seed(6)
    distributions = torch.rand(200, 13, generator=generator, dtype=torch.float64) ** 3
    distributions[torch.rand(200, 13, generator=generator) < 0.4] = 0.0
    distributions[:, 5] += 1e-3
    distributions = (distributions / distributions.sum(-1, keepdim=True)).to(dtype)
    ids = sample(distributions, torch.full((200,), u, dtype=torch.float64))
    assert bool((distributions.gather(1, ids[:, None]) > 0).all())  # no id of zero mass
    naive = [inverse_cdf(row, u) for row in distributions.double().numpy()]
    assert ids.tolist() == naive


@pytest.mark.parametrize(
    ("bad", "what"), [(math.nan, "NaN"), (math.inf, r"\+inf"), (-math.inf, "nothing but -inf")]
)
def test_check_names_row_and_position_and_looks_at_no_padding(bad, what):
    logits = torch.zeros(2, 3, 4)
    logits[0, 1:], logits[0, 0, 0] = math.nan, -math.inf
    require_valid_logits(logits, "target", [5, 10], [1, 3])
    logits[1, 2] = bad
    with pytest.raises(NumericsError, match=f"{what} at position 12 of row 1; try dtype='float32'"):
        require_valid_logits(logits, "target", [5, 10], [1, 3])


@pytest.mark.parametrize("row", [[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_what_is_no_distribution_is_not_drawn_from(row):
    """A NaN row must raise, not turn into some token (vLLM #41834)."""
    distributions = torch.tensor([[0.5, 0.5], row])
    with pytest.raises(NumericsError, match="no mass or holds NaN"):
        sample(distributions, torch.tensor([0.3, 0.3], dtype=torch.float64))


class Elsewhere(TorchFunctionMode):
    """No tensor is on a CPU, as far as the code can tell."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == torch.Tensor.is_cpu.__get__:
            return False
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("params", [*COMBINATIONS, *CUT], ids=str)
def test_a_distribution_is_the_same_on_a_device(params):
    """Where the host may look at nothing; ties at every cut."""
    logits = torch.randint(12, (4, 3, 60), generator=torch.manual_seed(2)).double() / 3
    here = probabilities(logits, params)
    with Elsewhere():
        there = probabilities(logits, params)
    assert torch.equal(here, there)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [1, 200])
def test_filters_in_a_tensor_are_those_of_params(dtype, spread):
    """Each row has filters of its own; ties at every cut, impossible ids, and probabilities that
    underflow."""
    params = [each for each in COMBINATIONS for _ in range(3)]
    logits = torch.randint(12, (len(params), 60), generator=torch.manual_seed(2)).to(dtype) / 3
    logits[::3, ::4] = -math.inf
    filters = torch.tensor([each.standard[:4] for each in params], dtype=torch.float64)
    ranked = (filters[:, 1] > 0) | (filters[:, 2] < 1)
    with Elsewhere():
        for some in (ranked, ~ranked):
            made = warp_by_tensors(
                logits[some] * spread, filters[some], ranked=bool(ranked[some].any())
            ).softmax(-1)
            expected = [
                probabilities(row * spread, each)
                for row, each, chosen in zip(logits, params, some.tolist(), strict=True)
                if chosen
            ]
            assert alike(made, torch.stack(expected)) and made.dtype == dtype
    assert alike(
        warp_by_tensors(logits, filters, ranked=True).softmax(-1)[~ranked],
        warp_by_tensors(logits, filters, ranked=False).softmax(-1)[~ranked],
    )


def scattered(seed: int, B: int = 64, V: int = 500) -> torch.Tensor:
    """Distributions with most ids of no mass, some at both ends."""
    dice = torch.Generator().manual_seed(seed)
    distributions = torch.rand(B, V, generator=dice, dtype=torch.float64)
    distributions *= torch.rand(B, V, generator=dice) < 0.1
    distributions[:, :5] = distributions[:, -5:] = 0
    return distributions / distributions.sum(-1, keepdim=True)


def reordered(distributions: torch.Tensor, seed: int) -> torch.Tensor:
    """A running sum that was added up in another order at every place, as a parallel scan may."""
    dice = torch.Generator().manual_seed(seed)
    sums = distributions.cumsum(-1)
    return sums + 4e-16 * (torch.rand(sums.shape, generator=dice, dtype=torch.float64) - 0.5)


def test_no_id_without_mass_whatever_the_order_of_the_sum():
    """A zero's sum may differ from its neighbour's by rounding; the numbers lie on the edges."""
    careless = 0
    for seed in range(20):
        distributions = scattered(seed)
        cdf = reordered(distributions, seed)
        edge = torch.randint(
            distributions.shape[1], (len(distributions), 1), generator=torch.manual_seed(seed)
        )
        u = (cdf.gather(1, edge) / cdf[:, -1:]).squeeze(1).clamp(0, 1 - 2**-53)
        with Elsewhere():
            ids, _ = locate(distributions, u, cdf)
        assert (distributions.gather(1, ids[:, None]) > 0).all()
        drawn_ids = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True).clamp(max=499)
        careless += int((distributions.gather(1, drawn_ids) == 0).sum())
    assert careless > 100  # the plain search does return such ids


def test_a_device_draws_what_the_cpu_draws():
    distributions = scattered(7)
    u = torch.rand(len(distributions), generator=torch.manual_seed(3), dtype=torch.float64)
    with Elsewhere():
        ids, masses = locate(distributions, u)
    assert torch.equal(ids, sample(distributions, u))
    assert torch.allclose(masses, torch.ones(len(distributions)).double())


def test_the_nearest_possible_id():
    distributions = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    found = [int(find_possible(distributions, torch.tensor([[j]]))) for j in range(6)]
    assert found == [1, 1, 1, 3, 3, 3]
    assert 0 <= int(find_possible(torch.full((1, 5), math.nan), torch.tensor([[5]]))) < 5


@pytest.mark.parametrize("V", [1300, 8192, 8193, 8447])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_long_distribution_is_drawn_from_as_a_short_one(V, dtype):
    """Masses are whole numbers, whose sums are exact in any order; numbers lie on the edges too."""
    dice = torch.Generator().manual_seed(V)
    distributions = torch.randint(4, (64, V), generator=dice).to(dtype)
    distributions *= torch.rand(64, V, generator=dice) < 0.05
    distributions[:, :300] = distributions[:, -300:] = 0
    cdf = compute_cdf(distributions)
    edge = torch.randint(V, (64, 1), generator=dice)
    u = (cdf.gather(1, edge) / cdf[:, -1:]).squeeze(1).clamp(0, 1 - 2**-53)
    for numbers in (u, torch.zeros(64).double(), torch.full((64,), 1 - 2**-53).double()):
        ids, masses = locate(distributions, numbers)
        assert torch.equal(ids, locate(distributions, numbers, cdf)[0])
        assert torch.equal(masses, cdf[:, -1]) and (distributions.gather(1, ids[:, None]) > 0).all()


@pytest.mark.parametrize("V", [2, 8193])
def test_a_row_that_is_no_distribution_gives_some_id(V):
    """It is found out later, from its mass."""
    distributions = torch.zeros(3, V)
    distributions[0, 0], distributions[2, :2] = math.nan, torch.tensor([0.25, 0.75])
    for place in (Elsewhere(), torch.inference_mode()):
        with place:
            ids, masses = locate(distributions, torch.full((3,), 0.5).double())
        assert ((ids >= 0) & (ids < V)).all()
        assert [0 < mass < math.inf for mass in masses.tolist()] == [False, False, True]


@pytest.mark.parametrize("scale", [0.1, 2.0, 6.0])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_p_of_a_large_vocabulary_is_that_of_a_full_sort(scale, top_p, dtype):
    """Whether the likeliest suffice to find the edge or not; with equals at the edge too."""
    logits = torch.randn(3, 20_000, generator=torch.manual_seed(5), dtype=torch.float64) * scale
    logits[1] = logits[1].round(decimals=0 if scale > 1 else 1)
    logits = logits.to(dtype)
    values = probabilities(logits, SamplingParams(1.0, top_p=top_p))
    for row, kept in zip(logits, values, strict=True):
        ordered, places = row.double().sort(stable=True)
        mass = ordered.softmax(-1).cumsum(-1)
        out = places[mass <= 1 - top_p]
        rounding = 1e-5 if dtype == torch.float32 else 1e-12
        near = places[(mass - (1 - top_p)).abs() < rounding]
        wrong = (kept[out] > 0) & ~torch.isin(out, near)
        assert not wrong.any()
        stays = places[mass > 1 - top_p]
        lost = (kept[stays] == 0) & ~torch.isin(stays, near)
        assert not lost.any()
