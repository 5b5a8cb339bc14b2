"""The target as its own draft, by name: what comes of a name, and one line for what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import foretoken
from foretoken.certificate.greedy_identity import replay
from foretoken.drafters.lm import LMDrafter
from foretoken.errors import ForetokenError, InputError, RefusedError
from foretoken.loading.options import list_smaller_dtypes
from foretoken.loading.sources import ModelSource
from foretoken.measurement.agreement import compute_overlaps
from foretoken.models.native.model import NativeTargetCopy
from foretoken.sampling.params import SamplingParams
from loads import refused
from tiny import byte_level, folder, llama, t5

pytestmark = pytest.mark.native
WIDE = {"hidden_size": 128, "intermediate_size": 192}  # weights that are worth rounding


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("own") / "target", llama(**WIDE), byte_level())


@pytest.fixture(scope="module")
def seq2seq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = t5(d_model=128, d_ff=192)
    return folder(tmp_path_factory.mktemp("own") / "t5", model, byte_level())


DRAFTS = ("self:0", "self:int8")
CASES = [("target", draft) for draft in DRAFTS]
CASES += [pytest.param("seq2seq", draft, marks=pytest.mark.prove) for draft in DRAFTS]


@pytest.mark.parametrize(("kind", "draft"), CASES)
def test_greedy_text_is_the_targets(kind, draft, request):
    path = request.getfixturevalue(kind)
    prompts = ["It was", "the first day of", "a"]
    plain = foretoken.load(path, "none").generate(prompts, max_new_tokens=20)
    spec = foretoken.load(path, draft)
    assert isinstance(spec.drafter, LMDrafter) and isinstance(spec.drafter.model, NativeTargetCopy)
    assert spec.draft_name == draft
    for gamma in (3, None):
        completions = spec.generate(prompts, max_new_tokens=20, gamma=gamma)
        assert [each.tokens for each in completions] == [each.tokens for each in plain]
    assert all(each.stats.draft_runtime == "native" for each in completions)
    sampled = spec.generate(prompts, max_new_tokens=20, gamma=3, temperature=1.0)
    assert all(each.stats.drafted and each.stats.bias == 0 for each in sampled)


@pytest.mark.parametrize(
    ("draft", "options", "computed"),
    [
        ("self", {"dtype": "int8"}, "int4"),
        ("self", {"draft_dtype": "int8"}, "int8"),
        ("self:0", {"dtype": "bfloat16"}, None),
        ("self:0", {"draft_dtype": "int4"}, "int4"),
    ],
)
def test_the_arithmetic_of_target_and_copy(target, draft, options, computed):
    spec = foretoken.load(target, draft, **options)
    plain = foretoken.load(target, "none", dtype=options.get("dtype", "float32"))
    assert spec.target.compute_dtype == plain.target.compute_dtype
    assert computed in (None, spec.drafter.model.compute_dtype)
    (completion,) = spec.generate([3, 4], max_new_tokens=12, gamma=3, temperature=1.0)
    assert completion.stats.drafted and len(completion.tokens) == 12


def test_it_is_replayed_and_measured(target):
    spec, params = foretoken.load(target, "self:int8"), SamplingParams(1.0, max_new_tokens=6)
    requests = spec.inputs.make_requests([[3, 4, 5], [7, 8]], params, 0)
    texts = [each.tokens for each in spec.generate([[3, 4, 5], [7, 8]], max_new_tokens=6)]
    places = list(replay(spec.target, spec.drafter, requests, texts, params))
    betas = [torch.minimum(place.p, place.q).sum(-1) for place in places]
    assert all(float(beta.min()) > 0.8 for beta in betas)
    alone = compute_overlaps(spec.target, spec.drafter, requests[0], texts[0], params)
    assert alone == pytest.approx([float(beta[0]) for beta in betas], abs=1e-3)


def test_a_model_in_memory():
    model = llama(**WIDE)
    spec = foretoken.load(model, "self", runtime="native")
    plain = foretoken.load(model, "none").generate([3, 4, 5], max_new_tokens=12)
    assert spec.generate([3, 4, 5], max_new_tokens=12, gamma=2)[0].tokens == plain[0].tokens
    assert list_smaller_dtypes("bfloat16") == ("int8", "int4")
    assert list_smaller_dtypes("int8") == ("int4",) and list_smaller_dtypes("int4") == ()


def test_a_kept_copy_is_not_made_again(target, monkeypatch):
    foretoken.load(target, "self")

    def network(*args):
        raise AssertionError("the weights are read again")

    monkeypatch.setattr(ModelSource, "load_network", network)
    foretoken.load(target, "self")


@pytest.mark.parametrize("draft", ["lookup", "self:int4"])
def test_a_seed_gives_one_text_whatever_ran_before(target, draft):
    spec = foretoken.load(target, draft, dtype="int8")

    def texts(gamma: int | None) -> list[list[int]]:
        options = {"max_new_tokens": 40, "temperature": 1.0, "seed": 3, "gamma": gamma}
        return [each.tokens for each in spec.generate(["It was", "the day"], **options)]

    first = {gamma: texts(gamma) for gamma in (0, 3)}
    texts(None)
    assert {gamma: texts(gamma) for gamma in (3, 0)} == first


INVALID: list[tuple[str, dict[str, str], type[ForetokenError], str]] = [
    ("self:2", {}, InputError, "not all of the target's 2 layers, 0 to 1"),
    ("self:0-1", {}, InputError, "not all of the target's 2 layers"),
    ("self:1,0", {}, InputError, "in ascending order"),
    ("self:0-999999999999", {}, InputError, "not all of the target's 2 layers"),
    ("self:0,", {}, InputError, "give self, self:int4, self:int8, or self: and indices"),
    ("self:", {}, InputError, "'self:'; give self, self:int4, self:int8"),
    ("self:int3", {}, InputError, "'self:int3'; give self, self:int4"),
    ("self:int4", {"draft_dtype": "int8"}, InputError, "'int8'; leave out draft_dtype"),
    ("self", {"dtype": "int4"}, InputError, "weights are in int4 too; give a target of another"),
    ("self", {"runtime": "transformers"}, RefusedError, "give runtime='native'"),
    ("self", {"draft_dtype": "float16"}, RefusedError, "does not support float16"),
]


def test_copies_that_are_refused(target):
    for draft, options, kind, says in INVALID:
        refused(kind, says, target, draft, **options)
    refused(RefusedError, "transformers does not share", llama(), "self")


def test_a_prompt_is_read_once_by_the_target_alone(target, monkeypatch):
    spec = foretoken.load(target, "self:int8")
    counts: list[int] = []
    chain = NativeTargetCopy.chain

    def counted(self, blocks, *rest):
        counts.append(sum(map(len, blocks)))
        return chain(self, blocks, *rest)

    monkeypatch.setattr(NativeTargetCopy, "chain", counted)
    pieces = spec.stream([5, 6, 7] * 20, max_new_tokens=12, gamma=3)
    next(pieces)
    assert not counts
    next(pieces)
    assert counts == [1]  # the last token
    pieces.close()
