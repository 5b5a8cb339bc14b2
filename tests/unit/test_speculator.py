"""What generate and stream promise to those who call them, on tiny models."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from foretoken.costing import stored_costs
from foretoken.costing.costs import Costs
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.drafters.uniform import UniformDrafter
from foretoken.engine.engine import Engine
from foretoken.errors import ForetokenError, InputError
from foretoken.generation_config import EndTokens
from foretoken.models.stock.model import CausalModel, Seq2SeqModel
from foretoken.sampling.acceptance_rules import speculative
from foretoken.sampling.params import SamplingParams
from foretoken.speculator import MAX_BATCH_SIZE, Speculator
from foretoken.text.decoding import decode
from oracle import random_model
from table import TableModel
from tiny import byte_level, llama, metaspace, t5

V = 7
P, Q = random_model(1, V), random_model(2, V)
FREE = EndTokens()
IDS = [[1, 2, 3], [4], [5, 6, 5, 6, 5], [2, 2]]


def table(context: int | None = None, ends: EndTokens = FREE, drafter=None) -> Speculator:
    drafter = LMDrafter(TableModel(Q, V), V) if drafter is None else drafter
    return Speculator(TableModel(P, V, context=context), drafter, ends=ends)


def spoken(tokenizer, V: int, ends: EndTokens = FREE, seed: int = 0) -> Speculator:
    target, draft = (TableModel(random_model(n, V), V, context=96) for n in (seed, seed + 50))
    return Speculator(target, LMDrafter(draft, V), tokenizer, ends)


@pytest.fixture(scope="module")
def double() -> Speculator:
    """A pair of random Llamas in float64."""
    target, draft = llama(64, seed=3).double(), llama(64, seed=4).double()
    return Speculator(CausalModel(target), LMDrafter(CausalModel(draft), 64))


def told(error: pytest.ExceptionInfo[ForetokenError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_parts_stay_and_another_is_made_of_them():
    spec = table()
    for name in ("drafter", "target", "tokenizer"):
        remedy = rf"another Speculator with dataclasses.replace\(spec, {name}=...\)"
        with pytest.raises(
            InputError, match=f"^the {name} of .* cannot be changed; make {remedy}$"
        ):
            setattr(spec, name, None)
    other = replace(spec, drafter=NoDrafter())
    assert isinstance(other.drafter, NoDrafter) and other.target is spec.target
    assert isinstance(spec.drafter, LMDrafter)


# Prompts


def test_no_prompts_are_no_completions_and_measure_nothing():
    assert table(context=1).generate([]) == []


def test_a_text_prompt_gets_the_special_tokens_of_the_tokenizer():
    spec = Speculator(Seq2SeqModel(t5(321)), NoDrafter(), metaspace(), EndTokens(decoder_start=0))
    assert spec.inputs.encode_prompt("It was") == metaspace()("It was").input_ids


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ("text", "prompt 0 is text, but there is no tokenizer; give token ids"),
        ("", "prompt 0 is empty"),
        ("\ud800", "prompt 0 is not valid text"),
        ([[1], "a\udcffb"], "prompt 1 is not valid text"),
        ([[1], []], "prompt 1 is empty"),
        ([[1], [0, 7]], r"prompt 1 holds the id 7; ids must be in 0\.\.6"),
    ],
)
def test_bad_prompts(prompts, says):
    with pytest.raises(InputError, match=says) as error:
        table().generate(prompts)
    told(error)


def test_a_prompt_that_fills_the_context_is_refused_and_one_less_is_not():
    spec = table(context=5)
    with pytest.raises(
        InputError, match="prompt 1 has 5 tokens, but the model's context length is 5"
    ):
        spec.generate([[1], [1] * 5], gamma=1)
    (completion,) = spec.generate([[1] * 4], gamma=1)
    assert len(completion.tokens) == 1 and completion.finish_reason == "length"


def test_a_source_may_fill_the_encoder_but_not_more():
    target = TableModel(P, V, encoder_decoder=True)
    target.source_context = 4
    spec = Speculator(target, NoDrafter(), ends=EndTokens(decoder_start=0))
    assert len(spec.generate([1] * 4, max_new_tokens=3)[0].tokens) == 3
    with pytest.raises(
        InputError, match="prompt 0 has 5 tokens, but the model's context length is 4"
    ):
        spec.generate([1] * 5)


def test_a_text_without_tokens_is_refused():
    spec = spoken(metaspace(), 321)
    drops_all = lambda text, **_: type("Found", (), {"input_ids": []})  # noqa: E731
    spec = replace(spec, tokenizer=drops_all)
    with pytest.raises(InputError, match="prompt 0 has no tokens"):
        spec.generate("\u200b")


def test_prompts_as_tensors_and_arrays_and_a_tokenizer_s_batch():
    spec, words = spoken(byte_level(), 320), byte_level()
    expected = [c.tokens for c in spec.generate(["It was", "He"], max_new_tokens=5)]
    words.pad_token = "a"
    batch = words(["It was", "He"], padding=True, return_tensors="pt", padding_side="left")
    assert [c.tokens for c in spec.generate(batch, max_new_tokens=5)] == expected
    one = torch.tensor(words("It was").input_ids)
    for prompt in (one, one[None], one.numpy(), [one]):
        assert spec.generate(prompt, max_new_tokens=5)[0].tokens == expected[0]
    assert [p.tokens for p in spec.stream(one, max_new_tokens=5)]


def test_numbers_of_numpy_and_fractions_are_numbers():
    spec = table()
    numbers = {"max_new_tokens": np.int8(20), "gamma": np.int8(3), "seed": np.uint8(7)}
    numbers |= {"temperature": Fraction(3, 4), "top_k": np.int64(5), "lenience": Fraction(1, 2)}
    (completion,) = spec.generate([1, 2], **numbers)
    plain = {"max_new_tokens": 20, "gamma": 3, "seed": 7}
    plain |= {"temperature": 0.75, "top_k": 5, "lenience": 0.5}
    assert completion.tokens == spec.generate([1, 2], **plain)[0].tokens
    json.dumps(
        [completion.seed, completion.stats.to_dict(), [asdict(step) for step in completion.steps]]
    )


# Options


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; give 1 or more"),
        ({"gamma": 1.5}, "gamma is 1.5; give a whole number"),
        ({"gamma": "3"}, "gamma is '3'; give a whole number"),
        ({"rule": 5}, "rule is 5; give one of speculative, block, match, rejection, coupled"),
        ({"gamma": -1}, r"gamma is -1; give 0 \(plain decoding\) or more"),
        ({"gamma": 16}, r"gamma is 16, but gamma \+ 1 must fit in the context of 16"),
        (
            {"rule": "greedy"},
            "rule is 'greedy'; give one of speculative, block, match, rejection, coupled",
        ),
        ({"lenience": 0.0}, "lenience is 0.0; give a number from 1e-30 to 1; 1 is exact"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"seed": [1, 2]}, "seed has 2 entries for 1 prompts"),
        ({"seed": [(1, 2, 3)]}, r"seed holds \(1, 2, 3\)"),
        ({"seed": [(1, -2)]}, "seed is -2"),
        ({"seed": [1.5]}, "seed is 1.5"),
        ({"seed": "12"}, "seed is '12'"),
        ({"seed": True}, "seed is True"),
        ({"gamma": 10**5000}, r"gamma is a int too large to show, but gamma \+ 1 must fit"),
    ],
)
def test_bad_options(options, says):
    """The same from stream, and before anything is generated."""
    spec = table(context=16)
    for call in (spec.generate, spec.stream):
        with pytest.raises(ForetokenError, match=says) as error:
            call([1, 2], **options)
        told(error)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lenience_says_what_it_costs(temperature):
    options = {"temperature": temperature, "gamma": 3, "max_new_tokens": 30}
    exact = table().generate(IDS, **options)
    assert [c.tokens for c in table().generate(IDS, lenience=1, **options)] == [
        c.tokens for c in exact
    ]
    assert all(c.stats.bias == 0 for c in exact)
    assert all(step.biases == () for c in exact for step in c.steps)
    lenient = table().generate(IDS, lenience=0.2, **options)
    for c in lenient:
        assert all(len(step.biases) == len(step.overlaps) for step in c.steps)
        assert c.stats.bias == pytest.approx(sum(sum(s.biases) for s in c.steps) / len(c.tokens))
    assert sum(c.stats.bias for c in lenient) > 0
    assert sum(c.stats.target_calls for c in lenient) < sum(c.stats.target_calls for c in exact)
    plain = table().generate(IDS, lenience=0.2, **(options | {"gamma": 0}))
    assert all(
        c.stats.bias == 0 for c in plain
    )  # without draft tokens there is nothing to be lenient to


def test_a_rule_by_name_or_as_a_function():
    options = {"temperature": 1.0, "gamma": 3, "max_new_tokens": 30}
    named = table().generate(IDS, rule="speculative", **options)
    seen = []

    def mine(p, q, x, lengths):
        seen.append(x.shape)
        return speculative(p, q, x, lengths)

    given_ = table().generate(IDS, rule=mine, **options)
    assert [c.tokens for c in named] == [c.tokens for c in given_] and seen
    block = table().generate(IDS, rule="block", **options)
    assert [c.tokens for c in block] != [c.tokens for c in named]


# Gamma


@pytest.mark.parametrize("drafter", [NoDrafter(), UniformDrafter(V)], ids=["none", "uniform"])
def test_gamma_0_is_one_token_a_target_call(drafter):
    for options in ({}, {"temperature": 1.0}):
        for completion in table(drafter=drafter).generate(
            IDS, gamma=0, max_new_tokens=9, **options
        ):
            stats = completion.stats
            assert stats.target_calls == len(completion.tokens) == stats.rounds == 9
            assert stats.drafted == stats.accepted == stats.draft_calls == 0
            assert stats.alpha is None and stats.accepted_per_drafted is None
            assert stats.tokens_per_call == 1


def test_automatic_gamma_is_measured_once_for_a_size_of_batch():
    spec = table(context=64)
    for temperature in (1.0, 0.5, 1.0):
        spec.generate([1, 2], temperature=temperature, max_new_tokens=40)
    assert set(spec.costing.measured) == {("sampled", 1)}
    spec.generate([[1, 2]] * 3, temperature=1.0)
    spec.generate([[1, 2]] * 4, temperature=1.0)
    spec.generate([1, 2])
    spec.generate([1, 2], temperature=1.0, top_k=2)
    assert set(spec.costing.measured) == {("sampled", 1), ("sampled", 4)}


CHEAP = Costs(((0, 0.0), (16, 0.1)), ((1, 1.0), (17, 1.2)), ((1, 0.0),))


def named_pair(target="a", draft="b") -> Speculator:
    nets = llama(64, seed=3).double(), llama(64, seed=4).double()
    for net, name in zip(nets, (target, draft), strict=True):
        net.name_or_path = name
    return Speculator(CausalModel(nets[0]), LMDrafter(CausalModel(nets[1]), 64))


@pytest.mark.real_costs
@pytest.mark.parametrize("busy", [0.0, 0.6], ids=["idle", "busy"])
def test_costs_are_kept_and_the_next_process_measures_nothing(busy, tmp_path, monkeypatch):
    """However busy the machine is; and then the text is the same: it follows from frozen costs and
    the row's own past."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("foretoken.costing.contention.compute_others_share", lambda spans: busy)
    options = {"temperature": 1.0, "max_new_tokens": 40}
    first = named_pair().generate(IDS, **options)
    assert [each.others for each in stored_costs.list_entries()] == [
        busy,
        busy,
    ]  # of one row, and of four
    monkeypatch.setattr("foretoken.costing.pair_costs.probe", None)
    monkeypatch.setattr("foretoken.costing.pair_costs.probe_shared", None)
    again = named_pair().generate(IDS, **options)
    assert [c.tokens for c in again] == [c.tokens for c in first]
    assert [[s.gamma for s in c.steps] for c in again] == [
        [s.gamma for s in c.steps] for c in first
    ]


def test_costs_of_models_without_a_name_are_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    table().generate([1, 2])
    named_pair(draft="").generate([1, 2])
    assert stored_costs.list_entries() == []


@pytest.mark.real_costs
def test_costs_that_a_run_contradicts_are_measured_again_later(tmp_path, monkeypatch):
    """They say that a step takes an hour."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    hour = Costs(((0, 0.0), (16, 3600.0)), ((1, 3600.0), (17, 7200.0)), ((1, 0.0),))
    spec = named_pair()
    name = stored_costs.make_key(spec.target, spec.drafter, "greedy", 1)
    stored_costs.store_costs(name, stored_costs.StoredCosts(hour, 1.0, 0.0, when=1.0))
    for _ in range(2):
        before = spec.costing.get_step_costs(SamplingParams())
        spec.generate([1, 2], max_new_tokens=60, ignore_eos=True)
        assert spec.costing.get_step_costs(SamplingParams()) is before  # frozen here
    assert before == hour and stored_costs.load_costs(name).off > 2
    named_pair().generate([1, 2], max_new_tokens=4)
    assert (
        stored_costs.load_costs(name).costs.step_seconds(0) < 60
        and stored_costs.load_costs(name).off is None
    )


def test_costs_of_one_sequence_are_the_same_for_all_sizes_of_batches():
    """Only greedy costs are known for the larger size; a deterministic request does not see it."""
    dear = replace(CHEAP, draft=((0, 0.0), (16, 8.0)))
    gammas = []
    for rows in (1, 16):
        spec = Speculator(TableModel(P, V), LMDrafter(TableModel(P, V), V))
        spec.costing.measured |= {("greedy", 1): dear, ("greedy", 16): dear, ("sampled", 1): CHEAP}
        with Engine(spec, rows) as engine:
            engine.add([1, 2], temperature=1.0, max_new_tokens=40, deterministic=True)
            (found,) = [e.completion for _ in range(40) for e in engine.step() if e.completion]
        gammas.append([step.gamma for step in found.steps])
    assert gammas[0] == gammas[1] and max(gammas[0]) > 2


def test_automatic_gamma_asks_for_more_of_a_draft_that_is_right():
    asked = []
    for distribution in (P, lambda text: [0.0] * (V - 1) + [1.0]):
        spec = Speculator(TableModel(P, V), LMDrafter(TableModel(distribution, V), V))
        spec.costing.measured["sampled", 1] = CHEAP
        (completion,) = spec.generate([1, 2], temperature=1.0, max_new_tokens=80)
        asked.append([step.gamma for step in completion.steps])
    right, wrong = asked
    assert max(right) >= 10 > 3 >= max(wrong[10:])


def test_automatic_gamma_with_a_draft_that_is_the_target(double):
    """alpha is 1 but for rounding, which no formula may stumble over."""
    for dtype in (torch.float32, torch.bfloat16):
        model = llama(64, seed=3).to(dtype)
        spec = Speculator(CausalModel(model), LMDrafter(CausalModel(model), 64))
        for temperature in (0.0, 0.7, 1.0):
            (completion,) = spec.generate([1, 2, 3], temperature=temperature, max_new_tokens=10)
            alpha = completion.stats.alpha
            assert alpha is None or 0.99 < alpha <= 1


@pytest.mark.parametrize("context", [2, 3, 4, 5, 8])
def test_automatic_gamma_fails_no_call_that_is_valid(context):
    """The measurement's own prompt is cut to what fits."""
    for temperature in (0.0, 1.0):
        (completion,) = table(context=context).generate([1], temperature=temperature)
        assert len(completion.tokens) == context - 1


@pytest.mark.parametrize("source", [1, 3, 6])
def test_automatic_gamma_with_a_short_encoder(source):
    target = TableModel(P, V, encoder_decoder=True)
    target.source_context = source
    spec = Speculator(target, UniformDrafter(V), ends=EndTokens(decoder_start=0))
    assert len(spec.generate([1], max_new_tokens=3)[0].tokens) == 3


def test_automatic_gamma_with_a_tokenizer_that_does_not_fit_the_model():
    """Its text is longer than the context, or has ids beyond the vocabulary, as ends may be."""
    ends = EndTokens(eos=frozenset({V + 9}))
    for context in (6, 64):
        target = TableModel(P, V, context=context)
        spec = Speculator(target, UniformDrafter(V), byte_level(), ends)
        assert len(spec.generate([1, 2], max_new_tokens=3)[0].tokens) == 3


# Seeds


def test_seeds_as_ints_lists_and_pairs():
    spec, options = table(), {"temperature": 1.0, "gamma": 2, "max_new_tokens": 40}
    first = spec.generate(IDS, seed=5, **options)
    paired = spec.generate(IDS, seed=[(5, i) for i in range(4)], **options)
    assert [c.tokens for c in paired] == [c.tokens for c in first]
    ints = spec.generate(IDS, seed=[5, 6, 7, 8], **options)
    assert [c.seed for c in ints] == [(5, 0), (6, 0), (7, 0), (8, 0)]
    assert ints[0].tokens == first[0].tokens and ints[1].tokens != first[1].tokens
    assert spec.generate(IDS[0], seed=(5,), **options)[0].tokens == first[0].tokens


def test_seed_none_is_drawn_and_reported():
    spec, options = table(), {"temperature": 1.0, "gamma": 2, "max_new_tokens": 40}
    one, two = (spec.generate(IDS, seed=None, **options) for _ in range(2))
    assert one[0].seed[0] == one[3].seed[0] != two[0].seed[0]  # equal once in 2**63
    again = spec.generate(IDS, seed=[c.seed for c in one], **options)
    assert [c.tokens for c in again] == [c.tokens for c in one]


# Ends


def test_the_end_of_sequence_is_in_tokens_and_not_in_text():
    spec = spoken(byte_level(), 320, EndTokens(eos=frozenset(range(100, 140))))
    ended = spec.generate(["It was", "The day", "Where"], temperature=1.0, max_new_tokens=60)
    assert {c.finish_reason for c in ended} == {"stop"}
    for done in ended:
        assert done.tokens[-1] in spec.ends.eos and not spec.ends.eos & set(done.tokens[:-1])
        decoded = byte_level().decode(done.tokens[:-1], clean_up_tokenization_spaces=False)
        assert done.text == decoded
        assert len(done.tokens) <= 60


def test_the_end_of_sequence_as_the_last_token_allowed_is_a_stop():
    ends = EndTokens(eos=frozenset(range(V)))
    (completion,) = table(ends=ends).generate([1], max_new_tokens=1)
    assert completion.finish_reason == "stop" and len(completion.tokens) == 1
    assert table().generate([1], max_new_tokens=1)[0].finish_reason == "length"


def test_the_context_ends_a_text_with_length():
    for gamma in (0, 1, 4):
        for completion in table(context=12).generate(IDS, gamma=gamma, temperature=1.0):
            prompt = IDS[completion.seed[1]]
            assert completion.finish_reason == "length" and len(completion.tokens) == 12 - len(
                prompt
            )


@pytest.mark.parametrize("gamma", [0, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_ends(gamma, temperature):
    ends = EndTokens(decoder_start=0, forced_bos=5, forced_eos=6, eos=frozenset({6}))
    drafter = LMDrafter(TableModel(Q, V), V)
    spec = Speculator(TableModel(P, V, encoder_decoder=True), drafter, ends=ends)
    options = {"gamma": gamma, "temperature": temperature, "max_new_tokens": 8}
    for completion in spec.generate(IDS, **options):
        assert completion.tokens[0] == 5 and completion.tokens[-1] == 6
        assert completion.finish_reason == "stop" and len(completion.tokens) <= 8
    never = replace(ends, eos=frozenset[int]())
    spec = Speculator(TableModel(P, V, encoder_decoder=True), drafter, ends=never)
    for completion in spec.generate(IDS, **options):
        assert len(completion.tokens) == 8 and completion.tokens[-1] == 6


def test_a_causal_prompt_of_several_tokens_has_its_second_token_already():
    ends = EndTokens(forced_bos=5)
    options = {"gamma": 0, "max_new_tokens": 3}
    free, forced = table().generate(IDS, **options), table(ends=ends).generate(IDS, **options)
    for prompt, a, b in zip(IDS, free, forced, strict=True):
        assert b.tokens == a.tokens if len(prompt) > 1 else b.tokens[0] == 5


# Streams


@pytest.mark.parametrize("words", ["byte_level", "metaspace"])
@pytest.mark.parametrize("gamma", [0, 3])
def test_pieces_are_exactly_what_generate_returns(words, gamma):
    """Random tokens: characters are cut anywhere, specials and ids without a token come between."""
    tokenizer = {"byte_level": byte_level, "metaspace": metaspace}[words]()
    spec = spoken(tokenizer, 330, EndTokens(eos=frozenset({2})), seed=7)
    for seed in range(5):
        options = {"temperature": 2.0, "gamma": gamma, "seed": seed, "max_new_tokens": 40}
        (whole,) = spec.generate("It was \U0001f600", **options)
        stream, pieces = spec.stream("It was \U0001f600", **options), []
        while True:
            try:
                pieces.append(next(stream))
            except StopIteration as end:
                assert end.value.tokens == whole.tokens and end.value.text == whole.text
                break
        assert "".join(piece.text for piece in pieces) == whole.text
        assert sum((piece.tokens for piece in pieces), []) == whole.tokens
        assert len(pieces) == whole.stats.target_calls


def test_a_stream_without_a_tokenizer_has_tokens_only():
    pieces = list(table().stream([1, 2], gamma=2, max_new_tokens=9))
    assert all(piece.text is None and piece.tokens for piece in pieces)
    assert sum(len(piece.tokens) for piece in pieces) == 9


@pytest.mark.parametrize("texts", [1, 2])
def test_a_stream_of_several_texts(texts):
    """Every piece says whose it is; the texts are those of generate."""
    spec, prompts = spoken(byte_level(), 320), ["It was", "The", "A"]
    options = {"temperature": 1.0, "max_new_tokens": 9, "num_return_sequences": texts, "gamma": 2}
    completions = spec.generate(prompts, **options)
    stream, pieces = spec.stream(prompts, **options), []
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            assert [each.tokens for each in end.value] == [each.tokens for each in completions]
            break
    for row, completion in enumerate(completions):
        own = [piece for piece in pieces if piece.row == row]
        assert "".join(piece.text for piece in own) == completion.text
        assert sum((piece.tokens for piece in own), []) == completion.tokens
    assert len({piece.row for piece in pieces[: 3 * texts]}) == 3 * texts  # all at once
    with pytest.raises(InputError, match="stream takes one prompt or more, not 0; give a prompt"):
        table().stream([])


# Interruptions


class Impatient(TableModel):
    """Ctrl-C during one of its runs."""

    def __init__(self, after: int) -> None:
        super().__init__(P, V)
        self.left = after

    def score(self, blocks, need):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return super().score(blocks, need)


def test_ctrl_c_returns_what_is_there_for_every_prompt():
    prompts = [[i % V] for i in range(MAX_BATCH_SIZE + 2)]
    spec = Speculator(Impatient(5), NoDrafter())
    completions = spec.generate(prompts, gamma=0, max_new_tokens=9)
    whole = table().generate(prompts, gamma=0, max_new_tokens=9)
    assert len(completions) == len(prompts)
    assert {c.finish_reason for c in completions} == {"interrupted"}
    for part, full in zip(completions[:MAX_BATCH_SIZE], whole, strict=False):
        assert part.tokens == full.tokens[:4]
    assert [c.tokens for c in completions[MAX_BATCH_SIZE:]] == [[], []]
    assert completions[-1].stats.tokens_per_call is None
    again = spec.generate(prompts, gamma=0, max_new_tokens=9)
    assert [c.tokens for c in again] == [c.tokens for c in whole]


def test_text_is_what_the_tokens_add_to_the_prompts():
    """In generate and stream, also where a decoder drops the space that a text begins with."""
    tokenizer = metaspace()
    man = tokenizer.convert_tokens_to_ids("▁man")
    distribution = [0.0] * len(tokenizer)
    distribution[man] = 1.0
    spec = Speculator(
        TableModel(lambda text: distribution, len(tokenizer)), LookupDrafter(), tokenizer
    )
    assert decode(tokenizer, [man] * 3) == "man man man"
    for prompt in ("the", tokenizer("the").input_ids):
        completion = spec.generate(prompt, max_new_tokens=3)[0]
        assert completion.text == " man man man"
        pieces = list(spec.stream(prompt, max_new_tokens=3))
        assert "".join(piece.text for piece in pieces) == completion.text


def test_a_row_of_its_own_for_each_return_sequence():
    """Keyed one after another, so that each can be made again alone."""
    three = table().generate(IDS[:2], temperature=1.0, num_return_sequences=3, gamma=2, seed=7)
    assert [one.seed for one in three] == [(7, i) for i in range(6)]
    for i, one in enumerate(three):
        (again,) = table().generate(IDS[i // 3], temperature=1.0, gamma=2, seed=[one.seed])
        assert again.tokens == one.tokens
    own = table().generate(IDS[:2], temperature=1.0, num_return_sequences=2, seed=[4, (5, 8)])
    assert [one.seed for one in own] == [(4, 0), (4, 1), (5, 8), (5, 9)]


@pytest.mark.parametrize("strings", [["th"], ["ing", " a", "e "], ["q" * 9]])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("least", [0, 25])
def test_stop_strings_are_one_path(strings, include, least):
    """Plain and speculative, batch and stream: the same text, tokens, reason and usage; within the
    least new tokens nothing ends."""
    spec = spoken(byte_level(), 320)
    sampling = {"max_new_tokens": 60, "stop_strings": strings, "include_stop_string": include}
    sampling |= {"min_new_tokens": least}
    for seed in range(2):
        options = sampling | {"temperature": 1.0, "rule": "coupled", "seed": [seed]}
        (plain,) = spec.generate("It was the", gamma=0, **options)
        (fast,) = spec.generate("It was the", gamma=3, **options)
        stream = spec.stream("It was the", gamma=3, **options)
        pieces = []
        try:
            while True:
                pieces.append(next(stream))
        except StopIteration as end:
            streamed = end.value
        for other in (fast, streamed):
            assert (other.text, other.tokens) == (plain.text, plain.tokens)
            assert other.finish_reason == plain.finish_reason
            assert other.stop_reason == plain.stop_reason
        assert "".join(piece.text or "" for piece in pieces) == plain.text
        assert [token for piece in pieces for token in piece.tokens] == plain.tokens
        if plain.stop_reason in strings:
            ends = (plain.text or "").endswith(str(plain.stop_reason))
            assert ends == include or (least and not include)
            assert len(plain.tokens) > least


def test_a_template_without_messages():
    with pytest.raises(
        InputError, match="^chat_template or .* is given, but the prompts are not messages"
    ):
        table().generate(IDS[0], chat_template="{{ messages }}")


def test_an_option_that_no_method_has():
    with pytest.raises(InputError, match="^num_beams is not an option of stream; "):
        table().stream(IDS[0], num_beams=2)


def test_a_score_that_a_temperature_would_take_beyond_a_float():
    """Such as processors give to force a token."""

    def force(ids, scores):
        scores[0, 3] = torch.finfo(scores.dtype).max
        return scores

    for temperature in (0.0, 0.01, 0.5, 1.0):
        sampling = {"temperature": temperature, "max_new_tokens": 4}
        (completion,) = table().generate(IDS[0], gamma=2, processors=force, **sampling)
        assert completion.tokens == [3] * 4
    (completion,) = table().generate(
        IDS[0], gamma=2, exponential_decay_length_penalty=(0, 1e200), max_new_tokens=4
    )
    assert completion.finish_reason in ("stop", "length")


def test_a_bad_grammar_is_told_before_a_stream_measures_costs(monkeypatch):
    spec = spoken(byte_level(), 320, EndTokens(eos=frozenset({0})))
    monkeypatch.setattr(spec.target, "score", None)  # nothing runs
    with pytest.raises(InputError, match="^structured's json_schema cannot be followed"):
        spec.stream("It was", structured={"json_schema": False})
