"""Guided texts are those of transformers' `guidance_scale`; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import foretoken
from census import build
from foretoken.errors import InputError, RefusedError
from foretoken.models.guidance import GuidedModel
from pairs import PROMPTS, relative, target
from table import TableModel

pytestmark = pytest.mark.daily

SCALE = 1.8
NEGATIVE = [9, 4, 17, 30, 2, 11]


@pytest.fixture(scope="module")
def spec() -> foretoken.Speculator:
    model = target("Llama")
    return foretoken.load(model, relative(model), runtime="transformers")


def theirs(
    model: Any,
    prompt: list[int],
    negative: list[int] | None,
    new: int = 12,
    allowed: list[int] | None = None,
) -> list[int]:
    """The tokens of transformers' own guided `generate`, without draft tokens, of one prompt."""
    given: dict[str, Any] = (
        {} if allowed is None else {"prefix_allowed_tokens_fn": lambda *_: allowed}
    )
    given |= {} if negative is None else {"negative_prompt_ids": torch.tensor([negative])}
    settings = {"do_sample": False, "max_new_tokens": new, "pad_token_id": 0}
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        made = model.generate(ids, guidance_scale=SCALE, **given, **settings)
    return made[0, len(prompt) :].tolist()


@pytest.mark.parametrize("negative", [None, NEGATIVE], ids=["last token", "a prompt"])
@pytest.mark.parametrize("gamma", [0, 1, 4])
def test_greedy_texts_are_those_of_transformers(spec, gamma, negative) -> None:
    """A ragged batch against each prompt alone."""
    own = spec.guided(SCALE, negative)
    outs = own.generate(PROMPTS, max_new_tokens=12, gamma=gamma)
    model = spec.target.model
    assert [out.tokens for out in outs] == [theirs(model, p, negative) for p in PROMPTS]
    plain = spec.generate(PROMPTS, max_new_tokens=12, gamma=0)
    assert [out.tokens for out in outs] != [out.tokens for out in plain]


def test_rows_that_wait_go_on_behind_their_prompt(spec) -> None:
    """A row that joins again has tokens of its own behind the prompt: both readings have them."""
    guided = GuidedModel(spec.target, SCALE, NEGATIVE)
    text, made = [5, 6, 7], [8, 20, 3]
    guided.set_prompt_lengths([3])
    guided.start([text[:-1]])
    whole = guided.score([[text[-1], *made]], [4])[0]
    guided.leave([0])
    guided.set_prompt_lengths([3, 3])
    guided.start([[*text, *made[:2]], text[:-1]])
    again = guided.score([made[2:], [text[-1]]], [1, 1])
    assert torch.allclose(again[:, 0], whole[[3, 0]], atol=1e-9)
    guided.permute([1, 0, 1])
    guided.set_lengths([2, 5, 2])
    once_more = guided.score([[text[-1], *made], made[2:], [text[-1]]], [4, 1, 1])
    assert torch.allclose(once_more[0], whole, atol=1e-9)
    assert torch.allclose(once_more[1:, 0], whole[[3, 0]], atol=1e-9)
    guided.leave([0, 1, 2])
    assert spec.target.lengths == []


def test_an_impossible_token_stays_impossible() -> None:
    table = TableModel(lambda text: [0.0, 0.25, 0.75] if text[-1] else [0.0, 0.5, 0.5], 3)
    guided = GuidedModel(table, 3.0, [0])
    guided.start([[]])
    logits = guided.score([[1]], [1])[0, 0]
    expected = torch.tensor([0.0, 0.25**3 / 0.5**2, 0.75**3 / 0.5**2], dtype=torch.float64)
    assert torch.allclose(logits.softmax(0), expected / expected.sum())


def test_no_guidance_is_the_model_to_the_bit(spec) -> None:
    plain = spec.generate(PROMPTS[0], temperature=1.0, max_new_tokens=8, gamma=0, seed=2)
    one = spec.guided(1).generate(PROMPTS[0], temperature=1.0, max_new_tokens=8, gamma=0, seed=2)
    assert one[0].tokens == plain[0].tokens


def test_what_cannot_be_guided_is_refused(spec) -> None:
    for scale in ("much", float("nan"), float("inf"), 1e300):
        with pytest.raises(InputError, match="^scale is .*give a number from -1000 to 1000"):
            spec.guided(scale)
    negatives = {"holds the id 999": [999], "is 5; give": 5, "holds 'a'": ["a"], "is empty": []}
    for problem, negative in negatives.items():
        with pytest.raises(InputError, match=f"^negative {problem}"):
            spec.guided(2.0, negative)
    with pytest.raises(InputError, match="^negative has 500 tokens, the model holds"):
        spec.guided(2.0, [3] * 500)
    with pytest.raises(RefusedError, match="an encoder"):
        foretoken.load(target("T5"), "lookup").guided(2.0)
    with pytest.raises(RefusedError, match="guidance has no prompt_logprobs"):
        spec.guided(2.0).generate(PROMPTS[0], max_new_tokens=2, prompt_logprobs=1, gamma=0)


@pytest.mark.parametrize("family", ["Emu3ForCausalLM", "ChameleonForConditionalGeneration"])
def test_families_that_write_image_tokens(family: str) -> None:
    """Emu3's are ids of its text model, of which its own mask allows some; Chameleon's code leaves
    them out itself."""
    torch.manual_seed(0)
    model = build(family)
    allowed = list(range(20, 60)) if family.startswith("Emu3") else None
    spec = foretoken.load(model, relative(model)).guided(SCALE, NEGATIVE)
    for gamma in (0, 1, 4):
        outs = spec.generate(PROMPTS, max_new_tokens=12, gamma=gamma, allowed_token_ids=allowed)
        for out, prompt in zip(outs, PROMPTS, strict=True):
            assert out.tokens == theirs(model, prompt, NEGATIVE, allowed=allowed)


def test_janus_writes_images_by_code_of_its_own() -> None:
    torch.manual_seed(0)
    model: Any = build("JanusForConditionalGeneration")
    spec = foretoken.load(model, "lookup")
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises((ValueError, RefusedError), match="generation_mode|custom_generate"):
        model.generate(ids, generation_mode="image", custom_generate=spec, max_new_tokens=4)
