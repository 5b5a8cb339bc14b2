"""Pictures and sounds in the prompts of decoders on the native kernels: texts are those of a
family's own `generate`, with draft tokens and without, in a batch; a row's pages are its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import foretoken
from foretoken.engine.output_stream import Begun
from foretoken.errors import InputError
from foretoken.media.inputs import media_of
from foretoken.models.native.embedded import ends_of
from foretoken.models.native.media import NativeMediaModel
from foretoken.models.stock import media as stock_media
from media_models import (
    DECODERS,
    MARK,
    Inputs,
    Made,
    built,
    gemma3,
    llava,
    other,
    qwen2_5_vl,
    qwen3_5,
    relative,
)
from tiny import llama

pytestmark = [pytest.mark.cpu_only, pytest.mark.native, pytest.mark.daily]
NEW = 12


def generated(model: Any, inputs: Inputs) -> list[int]:
    """The new tokens of transformers' own greedy `generate`."""
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    return model.generate(**inputs, **settings)[0, inputs["input_ids"].shape[1] :].tolist()


def loaded(model: Any, draft: Any, **options: Any) -> tuple[foretoken.Speculator, NativeMediaModel]:
    spec = foretoken.load(model, draft, runtime="native", **options)
    assert isinstance(spec.target, NativeMediaModel)
    return spec, spec.target


@pytest.mark.parametrize("family", DECODERS)
def test_logits_are_those_of_generate(family: Callable[[], Made]) -> None:
    model, inputs = built(family)
    _, target = loaded(model, "lookup")
    (media,) = media_of(inputs, encodes=False)
    assert target.objection(media) is None
    assert stock_media.deviation(model, target, media) < 1e-5


@pytest.mark.daily("gemma3", "llava")
@pytest.mark.parametrize("family", DECODERS)
def test_texts_are_those_of_generate(family: Callable[[], Made]) -> None:
    """Rows with one picture, another, and text alone, which join together, by a draft that sees the
    pictures, too."""
    model, inputs = built(family)
    spec, _ = loaded(model, relative(model))
    text: Inputs = {"input_ids": torch.tensor([[1, 9, 4, 7]])}
    each = [inputs, other(inputs), text, inputs]
    wanted = [generated(model, one) for one in each]
    assert wanted[0] != wanted[1] or family not in (llava, qwen2_5_vl)
    for gamma in (0, 1, 4):
        prompts: Any = [one if one is not text else text["input_ids"][0].tolist() for one in each]
        completions = spec.generate(prompts, max_new_tokens=NEW, gamma=gamma, ignore_eos=True)
        assert [c.tokens for c in completions] == wanted
    assert any(step.accepted for c in completions for step in c.steps)


@pytest.mark.parametrize("draft", ["lookup", "self:0", "llama"])
def test_drafts_that_do_not_see_pictures(draft: str) -> None:
    model, inputs = built(qwen2_5_vl)
    made: Any = llama(100, 256) if draft == "llama" else draft
    spec, _ = loaded(model, made, same_tokenizer=True) if draft == "llama" else loaded(model, made)
    (out,) = spec.generate(inputs, max_new_tokens=NEW, gamma=3, ignore_eos=True)
    assert out.tokens == generated(model, inputs)


def test_pages_behind_a_picture_are_not_shared() -> None:
    """Two pictures stand for the same tokens."""
    model, inputs = built(llava)
    ids = torch.cat([inputs["input_ids"], torch.arange(40)[None] + 10], 1)
    inputs = {**inputs, "input_ids": ids}
    spec, target = loaded(model, "lookup")
    target.remember(True)
    for one in (inputs, other(inputs), inputs):
        (out,) = spec.generate(one, max_new_tokens=NEW, gamma=2, ignore_eos=True)
        assert out.tokens == generated(model, one)
    assert not target.pool.cached


@pytest.mark.daily("gemma3")
@pytest.mark.parametrize("family", [llava, gemma3, qwen3_5])
def test_long_prompts_are_read_in_passes(family: Callable[[], Made]) -> None:
    """Of 256 tokens, or in one where pictures' tokens attend to later ones."""
    model, inputs = built(family)
    text = torch.arange(300)[None] % 80 + 3
    prompt = torch.cat([text, inputs["input_ids"], text], 1)
    inputs = {**inputs, "input_ids": prompt}
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in inputs:
            inputs[name] = (prompt == MARK).long()
    for config in (model.config, model.config.get_text_config()):
        config.max_position_embeddings = 1000
    spec, _ = loaded(model, relative(model))
    for gamma in (0, 3):
        (out,) = spec.generate(inputs, max_new_tokens=NEW, gamma=gamma, ignore_eos=True)
        assert out.tokens == generated(model, inputs)


@pytest.mark.daily("qwen3_5")
@pytest.mark.parametrize("family", DECODERS)
def test_folders_are_native(family: Callable[[], Made], tmp_path: Path) -> None:
    """Also where text alone could be read by another class of the config."""
    model, inputs = built(family)
    model.save_pretrained(tmp_path)
    spec = foretoken.load(tmp_path, "lookup")
    assert isinstance(spec.target, NativeMediaModel)
    (out,) = spec.generate(inputs, max_new_tokens=NEW, gamma=2, ignore_eos=True)
    assert out.tokens == generated(model, inputs)


def test_a_folder_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network is loaded with the first picture, for the check, too; its decoder is dropped. In
    integers the text is another model's, the same with draft tokens."""
    model, inputs = built(gemma3, 1)  # no other test has this folder
    model.save_pretrained(tmp_path)
    checks, check = list[int](), stock_media.objection

    def counted(*given: Any) -> Any:
        checks.append(1)
        return check(*given)

    monkeypatch.setattr(stock_media, "objection", counted)
    for dtype in ("float32", "float32", "int8"):
        spec = foretoken.load(tmp_path, "lookup", dtype=dtype)
        target = cast(Any, spec.target)
        assert isinstance(target, NativeMediaModel)
        assert "_network" not in vars(target)
        texts = [
            spec.generate(inputs, max_new_tokens=NEW, gamma=gamma, ignore_eos=True)[0].tokens
            for gamma in (0, 3)
        ]
        assert texts[0] == texts[1]
        assert dtype == "int8" or texts[0] == generated(model, inputs)
        assert not len(target._network.get_decoder().layers)
    assert len(checks) == 2  # one of each conversion


def test_what_is_refused() -> None:
    model, inputs = built(llava)
    spec, _ = loaded(model, "lookup")
    with pytest.raises(InputError, match="text has to follow"):
        ended = {**inputs, "input_ids": inputs["input_ids"][:, :-3]}
        assert ended["input_ids"][0, -1] == MARK
        spec.generate(ended, max_new_tokens=2)
    with pytest.raises(InputError, match="does not take pixel_values, speech"):
        spec.generate({**inputs, "speech": torch.zeros(1, 3)}, max_new_tokens=2)


@pytest.mark.parametrize("runtime", ["native", "transformers"])
@pytest.mark.parametrize("family", [llava, qwen2_5_vl, gemma3, qwen3_5])
def test_tokens_that_stand_for_pictures_are_text_where_they_are_generated(
    family: Callable[[], Made], runtime: str
) -> None:
    """A sequence that joins again has them behind its prompt; a faulty one fails alone."""
    model, inputs = built(family)
    spec = foretoken.load(model, "lookup", runtime=runtime)
    settings: Any = {"gamma": 0, "ignore_eos": True, "logit_bias": {MARK: 100.0}}
    (begun,) = spec.generate(inputs, max_new_tokens=3, **settings)
    assert set(begun.tokens) == {MARK}
    settings.pop("logit_bias")
    (text,) = spec.generate([[5, 6, 7]], max_new_tokens=8, gamma=0, ignore_eos=True)
    reasons: dict[int, Any] = {}
    with foretoken.Engine(spec, max_rows=4) as engine:
        again = engine.add(inputs, begun=Begun(begun.steps), max_new_tokens=8, **settings)
        other_row = engine.add([5, 6, 7], max_new_tokens=8, gamma=0, ignore_eos=True)
        while engine.running or engine.waiting:
            reasons |= {e.id: e.completion for e in engine.step() if e.finish_reason}
    assert reasons[again].finish_reason == "length"
    assert reasons[other_row].tokens == text.tokens
    assert reasons[again].tokens[:3] == begun.tokens


@pytest.mark.parametrize("first", [True, False])
def test_tokens_that_attend_to_the_last_one_are_refused(first: bool) -> None:
    """It is read by itself; a prompt that is refused leaves others as they are."""
    model, inputs = built(gemma3)
    spec, _ = loaded(model, "lookup")
    wanted = generated(model, inputs)
    every = {**inputs, "token_type_ids": torch.ones_like(inputs["token_type_ids"])}
    for one in (every, inputs) if first else (inputs, every):
        if one is every:
            with pytest.raises(InputError, match="text has to follow"):
                spec.generate(every, max_new_tokens=2)
        else:
            (out,) = spec.generate(inputs, max_new_tokens=NEW, gamma=2, ignore_eos=True)
            assert out.tokens == wanted


def test_masks_say_up_to_where_tokens_attend() -> None:
    n = 6
    causal = torch.ones(n, n).tril().bool()
    both = causal.clone()
    both[1:4, 1:4] = True
    assert ends_of(None, n, None) is None
    assert ends_of(torch.ones(1, n), n, None) is None
    assert ends_of(causal[None, None], n, None) is None
    expected = [1, 4, 4, 4, 5, 6]
    found = ends_of(both[None, None], n, None)
    assert found is not None
    assert found.tolist() == expected
    added = torch.where(both, 0.0, torch.finfo(torch.float32).min)[None, None]
    kinds = {"full_attention": added, "sliding_attention": added}
    found = ends_of(kinds, n, 6)
    assert found is not None
    assert found.tolist() == expected
    holes = both.clone()
    holes[5, 2] = False
    for wrong in (holes[None, None], kinds | {"full_attention": causal[None, None]}):
        with pytest.raises(foretoken.ForetokenError, match="does not know"):
            ends_of(wrong, n, None)
