"""Bugs that other systems had, each once through `generate` with real networks."""

from __future__ import annotations

import copy
from itertools import chain

import pytest
import torch

import pairs
from foretoken import Drafter, NumericsError, load
from foretoken.certificate.planted_bugs import OffByOneModel
from foretoken.drafters.base import Draft, Draw, pack
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.uniform import UniformDrafter
from foretoken.models.stock.model import CausalModel, Seq2SeqModel
from foretoken.sampling.acceptance_rules import EXACT_RULES
from pairs import DEVICE, PROMPTS, V, relative, target

pytestmark = pytest.mark.daily

DRAFTS = {
    "model": lambda model: relative(model),
    "uniform": lambda model: "uniform",
}


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_a_tiny_temperature_is_greedy_everywhere(name: str, kind: str) -> None:
    """vLLM #27077, NeMo #3627: below which temperature is argmax meant? Once, for all of the code.

    Just above it the distributions are computed, of logits in the millions: the text is the same.
    """
    model = target(name)
    pair = load(model, DRAFTS[kind](model))
    how = {"max_new_tokens": 16, "gamma": 3}
    greedy = pair.generate(PROMPTS, temperature=0.0, **how)
    for text, prompt in zip(greedy, PROMPTS, strict=True):
        pairs.assert_greedy(text, model, prompt, 16)
    for rule in EXACT_RULES:
        tiny = pair.generate(PROMPTS, temperature=1e-6, top_p=0.5, rule=rule, **how)
        small = pair.generate(PROMPTS, temperature=2e-5, rule=rule, **how)
        for a, b, c in zip(greedy, tiny, small, strict=True):
            assert a.tokens == b.tokens == c.tokens
            assert [r.draft_tokens for r in a.steps] == [r.draft_tokens for r in b.steps]
            certain = {1 / model.config.vocab_size} if kind == "uniform" else {0.0, 1.0}
            assert {beta for r in b.steps for beta in r.overlaps} <= certain  # q at the argmax
    pieces = list(pair.stream(PROMPTS[0], temperature=1e-6, **how))
    assert [token for piece in pieces for token in piece.tokens] == greedy[0].tokens


BAD = {"NaN": ([7], "nan"), r"\+inf": ([7], "inf"), "nothing but -inf": (range(V), "-inf")}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("what", BAD)
def test_invalid_logits_stop_the_call(what: str, temperature: float) -> None:
    """vLLM #41834, #53029: a row of NaN became token 0, or one past the vocabulary."""
    ids, value = BAD[what]
    sick, healthy = copy.deepcopy(target("Llama")), target("Llama")

    index = torch.tensor(list(ids), device=DEVICE)

    def spoil(module, args, logits):
        return logits.index_fill(-1, index, float(value))

    how = {"temperature": temperature, "gamma": 2, "max_new_tokens": 8}
    on = {"runtime": "transformers"}  # recorded passes would stay as loaded, without the hook
    for whose, pair in ("target", load(sick, healthy, **on)), ("draft", load(healthy, sick, **on)):
        hook = sick.get_output_embeddings().register_forward_hook(spoil)
        place = 3 + (whose == "draft")  # nothing is drafted for the first token
        with pytest.raises(
            NumericsError, match=f"the {whose}'s logits hold {what} at position {place}"
        ):
            pair.generate(PROMPTS[0], **how)
        hook.remove()
        (text,) = pair.generate(PROMPTS[0], **how)  # as good as new: the two are one again
        assert text.stats.alpha > 1 - 1e-6


@pytest.mark.native
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("runtime", ["transformers", "native"])
def test_a_draft_token_that_spoils_the_whole_pass_ends_no_text(runtime, temperature) -> None:
    """Its keys and values are NaN, and so is what earlier positions see of them: 0 * NaN."""
    healthy, spoilt = target("Llama"), copy.deepcopy(target("Llama"))
    how = {"max_new_tokens": 16, "temperature": temperature, "seed": 1, "rule": "coupled"}
    expected = load(healthy, "none").generate(PROMPTS, **how)
    seen = {*chain(*PROMPTS), *chain(*(text.tokens for text in expected))}
    unused = next(id for id in range(3, V) if id not in seen)
    spoilt.get_input_embeddings().weight[unused] = float("nan")
    pair = load(spoilt, Constant(unused), runtime=runtime)
    for text, plain in zip(pair.generate(PROMPTS, gamma=3, **how), expected, strict=True):
        assert (text.tokens, text.error) == (plain.tokens, None)


class Constant(UniformDrafter):
    """The same token for ever."""

    def __init__(self, token: int) -> None:
        super().__init__(V)
        self.token = token

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        return pack([[self.token] * count for count in gamma])


class Moody(OffByOneModel):
    """A model whose every fifth answer is turned by one id: it misleads its drafter."""

    def __init__(self, model) -> None:
        super().__init__(model)
        self.turned: list[bool] = []

    def score(self, blocks: list[list[int]], need: list[int]) -> torch.Tensor:
        logits = self.model.score(blocks, need)
        self.turned.append(len(self.turned) % 5 == 4)
        return logits.roll(1, -1) if self.turned[-1] else logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "T5"])
def test_a_draft_that_is_the_target_is_right_again_after_every_rejection(name, temperature) -> None:
    """EAGLE ports kept rejected tokens in the draft's cache, or the replacement twice.

    alpha is then below 1 although both models are one. Here each draft token that was not misled
    has overlap 1 and is kept, over 100 tokens of ragged rows and more than 20 rejections.
    """
    model = target(name)
    runner = (Seq2SeqModel if model.config.is_encoder_decoder else CausalModel)(model)
    moody = Moody(runner)
    pair = load(model, LMDrafter(moody, V))
    texts = pair.generate(PROMPTS, max_new_tokens=100, temperature=temperature, gamma=4, seed=3)
    rejections = 0
    for text in texts:
        at = 0
        for record in text.steps:
            turned = moody.turned[at : at + record.draft_calls]
            at += record.draft_calls
            for i, beta in enumerate(record.overlaps):
                assert turned[i] or beta > 1 - 1e-6
                assert i < record.accepted or turned[i]
            rejections += record.accepted < len(record.overlaps)
    assert rejections > 20
    assert len(pair.generate(PROMPTS, max_new_tokens=8, gamma=4)) == 3  # nothing is left behind


def test_alpha_is_one_where_the_draft_is_the_target() -> None:
    """The same without a rejection: everything is kept, gamma + 1 tokens a call."""
    spec = load(target("T5"), target("T5"))
    for text in spec.generate(PROMPTS, max_new_tokens=101, temperature=1.0, gamma=4):
        assert text.stats.alpha > 1 - 1e-6
        assert text.stats.accepted == text.stats.drafted == 80
        assert text.stats.target_calls == 21  # the first one drafts nothing


@pytest.mark.parametrize("gamma", [0, 4])
@pytest.mark.parametrize("name", ["Mistral", "Gemma 3"])
def test_sampled_text_far_past_a_window_has_the_distributions_of_full_forwards(name, gamma) -> None:
    """transformers #46629, #48280: beyond the window, masks and cached keys did not match.

    At a temperature the alpha of draft = target would show it; greedy text is compared elsewhere.
    """
    model = target(name)
    pair = load(model, model)
    for prompt, text in zip(
        PROMPTS,
        pair.generate(PROMPTS, max_new_tokens=60, temperature=0.7, gamma=gamma, seed=5),
        strict=True,
    ):
        likely = pairs.scores(model, [*prompt, *text.tokens])[len(prompt) - 1 : -1]
        drawn = (likely / 0.7).softmax(-1)[range(60), text.tokens]
        assert len(prompt) + 60 > 7 * pairs.WINDOW
        assert drawn.min() > 1e-5 and drawn.log().mean() > -3  # ids by chance would have -4.2
        assert text.stats.alpha is None or text.stats.alpha > 1 - 1e-6


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_nothing_comes_after_an_end_of_sequence(name: str, rule: str) -> None:
    """Many systems: the draft tokens behind an accepted EOS, or the bonus token, were kept."""
    model = target(name)
    ends = [3, 5, 7, 11, 20, 41]
    model.generation_config.eos_token_id = ends
    pair = load(model, model)
    model.generation_config.eos_token_id = None
    how = {"max_new_tokens": 12, "temperature": 1.0, "gamma": 4, "rule": rule}
    texts = pair.generate([PROMPTS[1]] * 48, **how)
    reasons = [text.finish_reason for text in texts]
    assert reasons.count("stop") > 10
    for text in texts:
        assert not set(ends) & set(text.tokens[:-1])
        assert (text.finish_reason == "stop") == (text.tokens[-1] in ends)
        assert text.finish_reason == "stop" or len(text.tokens) == 12
        assert text.stats.accepted <= len(text.tokens)
    # all draft tokens are right here: whatever was cut stood inside a kept block
    assert any(len(t.steps[-1].draft_tokens) > len(t.steps[-1].new_tokens) for t in texts)
    pieces = list(pair.stream(PROMPTS[1], seed=[0], **how))
    assert [token for piece in pieces for token in piece.tokens] == texts[0].tokens


class Untouchable(Drafter):
    """A drafter that must not be asked for anything."""

    def start(self, *args):
        raise AssertionError("touched")

    propose = commit = leave = start


def test_plain_decoding_costs_no_drafter_work() -> None:
    """Also where one is loaded: a comparison with plain decoding is then an honest one."""
    pair, how = load(target("T5"), Untouchable()), {"max_new_tokens": 6, "temperature": 1.0}
    for text in pair.generate(PROMPTS, gamma=0, **how):
        assert text.stats.target_calls == 6
        assert text.stats.draft_calls == text.stats.drafted == text.stats.accepted == 0
        assert text.stats.alpha is None and text.stats.accepted_per_drafted is None
    assert sum(len(piece.tokens) for piece in pair.stream(PROMPTS[0], gamma=0, **how)) == 6
    with pytest.raises(AssertionError, match="touched"):
        pair.generate(PROMPTS, gamma=1, **how)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_records_and_stats_agree(name: str, kind: str, temperature: float) -> None:
    """What is reported follows from the steps, and the steps from the text."""
    model = target(name)
    pair = pairs.speculator(model, DRAFTS[kind](model), eos=20)
    for rule in EXACT_RULES:
        for text in pair.generate(
            PROMPTS, max_new_tokens=20, temperature=temperature, gamma=3, rule=rule
        ):
            stats, steps = text.stats, text.steps
            assert [token for step in steps for token in step.new_tokens] == text.tokens
            assert stats.target_calls == stats.rounds == len(steps)
            assert stats.tokens_per_call == len(text.tokens) / len(steps)
            for step in steps:
                assert step.accepted <= step.drafted <= step.gamma <= 3
                assert step.new_tokens[: step.accepted] == step.draft_tokens[: step.accepted]
                assert len(step.new_tokens) == step.accepted + 1 or step is steps[-1]
                judged = min(step.accepted + 1, step.drafted)
                assert len(step.overlaps) == judged or step is steps[-1]
                assert all(0 <= beta <= 1 + 1e-12 for beta in step.overlaps)
                if temperature == 0 and kind == "uniform":  # p is one-hot: q at the argmax
                    assert set(step.overlaps) <= {1 / model.config.vocab_size}
                elif temperature == 0:
                    assert sum(step.overlaps) == step.accepted
                    assert set(step.overlaps) <= {0.0, 1.0}
            assert stats.accepted == sum(step.accepted for step in steps) <= stats.drafted
            assert stats.drafted == sum(len(step.draft_tokens) for step in steps)
            overlaps = [beta for step in steps for beta in step.overlaps]
            assert stats.alpha == (sum(overlaps) / len(overlaps) if overlaps else None)
            assert (stats.alpha is None) == (stats.drafted == 0)
