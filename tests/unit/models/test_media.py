"""Prompts with pictures and sounds, on torch and on the native kernels: texts are those of the
family's own `generate`, with draft tokens and without, alone and in a batch; a row's pages are its
own, an encoder runs once; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers as t
from torch import nn
from transformers.generation.utils import GenerationMixin

import foretoken
from foretoken.engine.output_stream import PartialOutput
from foretoken.errors import ForeignError, InputError, RefusedError
from foretoken.inputs import to_prompt_list
from foretoken.media.inputs import split_media
from foretoken.models.native.encoder_decoder import NativeMediaDecoder
from foretoken.models.native.media import NativeMediaModel, find_attention_ends
from foretoken.models.stock import media as stock_media
from media_models import (
    DECODERS,
    ENCODERS,
    LAYERS,
    MARK,
    PATCHES,
    Inputs,
    Made,
    built,
    canary,
    cohere_asr,
    gemma3,
    ids,
    lfm2_vl,
    llava,
    moonshine,
    other,
    pixels,
    qwen2_5_vl,
    qwen3_5,
    relative,
    speech2text,
    trocr,
    vibevoice_asr,
    whisper,
)
from media_models import TEXT as SIZES
from oracle import random_model
from table import TableModel
from tiny import llama

FAMILIES = [*DECODERS, *ENCODERS]
Family = Callable[[], Made]
QUICK = ["llava", "qwen3_5", "whisper", "canary", "gemma3 natively", "trocr natively"]
QUICK += ["whisper on graphs", "speech2text on graphs"]


def over(native: list[Family], torch: list[Family]) -> Any:
    """Cases of families on runtimes."""
    cases = [(f, "transformers", f.__name__) for f in torch]
    cases += [(f, "native", f"{f.__name__} natively") for f in native]
    cases += [(f, "graphs", f"{f.__name__} on graphs") for f in torch if f in ENCODERS]
    return pytest.mark.parametrize(
        ("family", "runtime"),
        [
            pytest.param(f, runtime, id=name, marks=[pytest.mark.native] * (runtime == "native"))
            for f, runtime, name in cases
        ],
    )


NEW = 12


def generated(model: Any, inputs: Any, **more: Any) -> list[int]:
    """The new tokens of transformers' own greedy `generate`."""
    begun = inputs.get("decoder_input_ids") if model.config.is_encoder_decoder else None
    begun = inputs["input_ids"] if begun is None else begun
    if model.config.is_encoder_decoder and "decoder_input_ids" not in inputs:
        begun = torch.zeros(1, 1)
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    mixin: Any = GenerationMixin
    return mixin.generate(model, **inputs, **settings, **more)[0, begun.shape[1] :].tolist()


@cache
def seeing() -> tuple[Any, Inputs, foretoken.Speculator]:
    model, inputs = built(llava)
    return model, inputs, foretoken.load(model, "lookup")


@pytest.mark.daily(*QUICK)
@over(DECODERS, FAMILIES)
def test_logits_are_those_of_generate(family: Family, runtime: str) -> None:
    model, inputs = built(family)
    target: Any = foretoken.load(model, "lookup", runtime=runtime).target
    (media,) = split_media(inputs, encodes=model.config.is_encoder_decoder)
    assert target.find_media_problem(media) is None
    assert stock_media.measure_generate_deviation(model, target, media) < 1e-5


@pytest.mark.daily(*QUICK)
@over([*DECODERS, whisper, trocr], FAMILIES)
def test_texts_are_those_of_generate(family: Family, runtime: str) -> None:
    """Rows that join together, by a draft that sees the pictures, too."""
    model, inputs = built(family)
    changed = other(inputs)
    if family in (whisper, trocr):
        more = torch.cat([inputs["decoder_input_ids"], torch.tensor([[4, 9, 5]])], 1)
        changed |= {"decoder_input_ids": more}
    spec = foretoken.load(model, relative(model), runtime=runtime)
    wanted = [generated(model, inputs), generated(model, changed)]
    assert wanted[0] != wanted[1] or family not in (llava, whisper)  # else all is one text
    for gamma in (0, 1, 4):
        every: Any = [inputs, changed, inputs]
        completions = spec.generate(every, max_new_tokens=NEW, gamma=gamma, ignore_eos=True)
        assert [c.tokens for c in completions] == [*wanted, wanted[0]]
        if runtime == "transformers":
            again = generated(model, inputs, custom_generate=spec, num_assistant_tokens=gamma)
            assert again == wanted[0]
    assert any(step.accepted for c in completions for step in c.steps)


@pytest.mark.native
@pytest.mark.parametrize(("family", "runtime"), [(llava, "transformers"), (qwen2_5_vl, "native")])
@pytest.mark.parametrize("draft", ["lookup", "llama", "self:0"])
def test_drafts_that_do_not_see_pictures(family: Family, runtime: str, draft: str) -> None:
    """A model sees the text, with the ids that stand for the picture; the text is the target's."""
    model, inputs = built(family)
    if draft == "self:0" and runtime != "native":
        pytest.skip("copies of layers are on the native decoder")
    made: Any = llama(100, 256) if draft == "llama" else draft
    how: Any = {"same_tokenizer": True} if draft == "llama" else {}
    spec = foretoken.load(model, made, runtime=runtime, **how)
    (out,) = spec.generate(inputs, max_new_tokens=NEW, gamma=3, ignore_eos=True)
    assert out.tokens == generated(model, inputs)
    assert draft == "lookup" or any(step.drafted for step in out.steps)


@pytest.mark.daily("qwen3_5", "gemma3 natively")
@over([llava, gemma3, qwen3_5], [qwen3_5, lfm2_vl])
def test_long_prompts_are_read_in_passes(family: Family, runtime: str) -> None:
    """Of some tokens, from which states follow, or in one where pictures' tokens attend to later
    ones."""
    model, inputs = built(family)
    text = torch.arange(300)[None] % 80 + 3
    prompt = torch.cat([text, inputs["input_ids"], text], 1)
    inputs = {**inputs, "input_ids": prompt}
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in inputs:
            inputs[name] = (prompt == MARK).long()
    for config in (model.config, model.config.get_text_config()):
        config.max_position_embeddings = 1000
    spec = foretoken.load(model, relative(model), runtime=runtime)
    for gamma in (0, 3):
        (out,) = spec.generate(inputs, max_new_tokens=NEW, gamma=gamma, ignore_eos=True)
        assert out.tokens == generated(model, inputs)


@pytest.mark.daily("moonshine")
@pytest.mark.parametrize("family", [speech2text, moonshine, canary, cohere_asr])
def test_padding_of_sounds_is_not_heard(family: Family) -> None:
    """Its decoder is told, by each family in its own way; also beside a sound without padding."""
    model, inputs = built(family)
    padded = {**inputs, "attention_mask": inputs["attention_mask"].clone()}
    padded["attention_mask"][:, padded["attention_mask"].shape[1] // 2 :] = 0
    spec = foretoken.load(model, relative(model))
    wanted = [generated(model, inputs), generated(model, padded)]
    for gamma in (0, 3):
        both: Any = [inputs, padded]
        texts = spec.generate(both, max_new_tokens=NEW, gamma=gamma, ignore_eos=True)
        assert [c.tokens for c in texts] == wanted
    assert generated(model, padded, custom_generate=spec) == wanted[1]


def test_sounds_to_which_a_model_adds_noise() -> None:
    """No two of its texts have to be equal."""
    model, inputs = built(vibevoice_asr)
    with pytest.raises(InputError, match="VibeVoiceAsrForConditionalGeneration is not exact"):
        foretoken.load(model, "lookup").generate(inputs, max_new_tokens=2)


def test_a_model_within_a_model_that_writes() -> None:
    """BLIP-2's own `generate` makes embeddings of its pictures and hands them to a model of text,
    with an encoder or without."""
    vision, former = {**PATCHES, "hidden_size": 32}, {"encoder_hidden_size": 32, **LAYERS}
    for text in (
        {"model_type": "opt", **SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32},
        {"model_type": "t5", "vocab_size": 100, "d_model": 32, "d_kv": 16, "d_ff": 64,
         "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 3},
    ):  # fmt: skip
        config = t.Blip2Config(
            vision_config=vision, qformer_config=former, text_config=text,
            num_query_tokens=4, image_token_index=MARK,
        )  # fmt: skip
        model, inputs = built(
            lambda config=config: (
                t.Blip2ForConditionalGeneration(config),
                {"input_ids": ids(4), "pixel_values": pixels(3, 28, 28)},
            )
        )
        model.language_model.generation_config.eos_token_id = None
        changed, spec = other(inputs), foretoken.load(model, relative(model))
        settings = {"max_new_tokens": NEW, "do_sample": False}
        wanted = [model.generate(**x, **settings)[0, -NEW:].tolist() for x in (inputs, changed)]
        both: Any = [inputs, changed]
        texts = spec.generate(both, max_new_tokens=NEW, gamma=3, ignore_eos=True)
        assert [c.tokens for c in texts] == wanted and wanted[0] != wanted[1]
        with pytest.raises(InputError, match="is only text, but the target"):
            spec.generate([[4, 5]], max_new_tokens=2)


def test_an_encoder_that_target_and_draft_share_runs_once() -> None:
    model, inputs = built(whisper)
    draft = relative(model)
    calls: list[str] = []
    for name, each in (("target", model), ("draft", draft)):
        each.get_encoder().register_forward_hook(lambda *_, name=name: calls.append(name))
    spec = foretoken.load(model, draft)
    spec.generate(inputs, max_new_tokens=2, gamma=2)  # the check of the first media is behind us
    calls.clear()
    (out,) = spec.generate(inputs, max_new_tokens=NEW, gamma=2, ignore_eos=True)
    assert len(calls) == 1 and any(step.accepted for step in out.steps)


def test_several_prompts_in_one_output_of_a_processor() -> None:
    """Rows are padded; each has its own picture."""
    model, inputs, spec = seeing()
    short, long = inputs["input_ids"], torch.cat([inputs["input_ids"], torch.tensor([[8, 4]])], 1)
    padded = torch.cat([torch.zeros(1, 2, dtype=torch.long), short], 1)
    both = {
        "input_ids": torch.cat([padded, long]),
        "attention_mask": torch.tensor([[0, 0] + [1] * short.shape[1], [1] * long.shape[1]]),
        "pixel_values": torch.cat([inputs["pixel_values"], other(inputs)["pixel_values"]]),
    }
    texts = [c.tokens for c in spec.generate(both, max_new_tokens=NEW, ignore_eos=True)]
    assert texts[0] == generated(model, inputs)
    assert texts[1] == generated(model, {**other(inputs), "input_ids": long})


def test_texts_and_outputs_with_and_without_pictures_share_a_batch() -> None:
    """They join and leave it in any order."""
    model, inputs, spec = seeing()
    plain = {"input_ids": torch.tensor([[0, 4, 5]]), "attention_mask": torch.tensor([[0, 1, 1]])}
    mixed: Any = [inputs, [4, 5], plain, inputs]
    limits = [foretoken.SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (12, 3, 12, 7)]
    texts = [c.tokens for c in spec.generate(mixed, limits)]
    picture, alone = (
        generated(model, inputs),
        generated(model, {"input_ids": torch.tensor([[4, 5]])}),
    )
    assert texts == [picture, alone[:3], alone, picture[:7]] and picture != alone
    only: Any = [plain]
    assert spec.generate(only, limits[:1])[0].tokens == alone


def test_a_mask_of_frames_is_not_cut_like_text() -> None:
    ids = torch.tensor([[0, 4, 5], [6, 7, 8]])
    output = {"input_ids": ids, "attention_mask": (ids > 0).long(), "token_type_ids": ids}
    made = split_media(output | {"feature_attention_mask": torch.ones(2, 3)}, encodes=False)
    first = {name: tuple(x.shape) for name, x in made[0].inputs.items()}
    assert first == {"token_type_ids": (1, 2), "feature_attention_mask": (1, 3)}


def test_calls_of_generate_that_cannot_be_decoded() -> None:
    """Pictures of several rows, which transformers' own `generate` has read already, and a target
    that reads ids only."""
    model, inputs = built(llava)
    both: Any = {name: torch.cat([x, x]) for name, x in inputs.items()}
    with pytest.raises(ForeignError, match="divided among 2 prompts; call generate for each"):
        model.generate(**both, max_new_tokens=2, custom_generate=foretoken.load(model, "lookup"))
    spec = foretoken.attach(model, draft="lookup")
    assert model.generate(**both, max_new_tokens=NEW, do_sample=False).shape == (
        2,
        inputs["input_ids"].shape[1] + NEW,
    )
    foretoken.detach(model)
    converted = replace(spec, target=TableModel(random_model(1, 100), 100))
    with pytest.raises(
        ForeignError, match="are not supported by the target on .*: it reads ids only"
    ):
        model.generate(**inputs, max_new_tokens=2, custom_generate=converted)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"pixel_values": torch.zeros(3, 3, 28, 28)}, "pixel_values has 3 entries for 2 prompts"),
        ({"pixel_values": "cat.png"}, "return_tensors='pt'"),
        ({"pixel_values": 3}, "one number"),
        ({"input_ids": None}, "no input_ids"),
        ({"whale": torch.zeros(2, 3)}, "does not take pixel_values, whale"),
    ],
)
def test_inputs_that_cannot_be_read(changed: dict[str, Any], message: str) -> None:
    _, inputs, spec = seeing()
    both = {name: torch.cat([x, x]) for name, x in inputs.items()}
    with pytest.raises(InputError, match=message):
        spec.generate(both | changed, max_new_tokens=2)


@pytest.mark.parametrize("family", [llava, whisper])
def test_an_engine_with_little_memory(family: Family) -> None:
    """Requests come while others run, some wait, and some are read again."""
    model, inputs = built(family)
    spec = foretoken.load(model, relative(model))
    prompts: list[Any] = [inputs, other(inputs), inputs, other(inputs), inputs]
    events: list[foretoken.Event] = []
    with foretoken.Engine(spec, kv_memory=700_000) as engine:
        for i, prompt in enumerate(prompts):
            engine.add(prompt, id=i, gamma=2, max_new_tokens=NEW, ignore_eos=True)
            events += engine.step()
        while engine.running or engine.waiting:
            events += engine.step()
    texts = {event.id: event.completion.tokens for event in events if event.completion}
    wanted = [generated(model, inputs), generated(model, other(inputs))]
    assert texts == {i: wanted[i % 2] for i in range(5)}


def test_what_is_not_read() -> None:
    _, inputs, spec = seeing()
    blind = foretoken.load(llama(100, 256), "lookup")
    hears = foretoken.load(built(whisper)[0], "lookup")
    converted = replace(spec, target=TableModel(random_model(1, 100), 100))
    for asked, prompts, says in (
        (blind, inputs, "LlamaForCausalLM does not take pixel_values; give text"),
        (converted, inputs, "accepts only ids; give text, or load a model"),
        (hears, [[4, 5]], "only text, but the target needs an image or audio"),
    ):
        with pytest.raises(InputError, match=says):
            asked.generate(prompts, max_new_tokens=2)
    with pytest.raises(InputError, match="prompt_logprobs"):
        spec.generate(inputs, max_new_tokens=2, prompt_logprobs=1)
    with pytest.raises(InputError, match="prompts contain pixel_values, but only ids are accepted"):
        to_prompt_list(inputs)  # refused, not left out: a certificate is of texts


def loaded(model: Any) -> tuple[foretoken.Speculator, NativeMediaModel]:
    spec = foretoken.load(model, "lookup", runtime="native")
    assert isinstance(spec.target, NativeMediaModel)
    return spec, spec.target


@pytest.mark.native
def test_pages_behind_a_picture_are_not_shared() -> None:
    """Two pictures stand for the same tokens."""
    model, inputs = built(llava)
    ids = torch.cat([inputs["input_ids"], torch.arange(40)[None] + 10], 1)
    inputs = {**inputs, "input_ids": ids}
    spec, target = loaded(model)
    target.set_prefix_caching(True)
    for one in (inputs, other(inputs), inputs):
        (out,) = spec.generate(one, max_new_tokens=NEW, gamma=2, ignore_eos=True)
        assert out.tokens == generated(model, one)
    assert not target.pool.prefix_cache


@pytest.mark.native
@pytest.mark.daily("qwen3_5")
@pytest.mark.parametrize("family", DECODERS)
def test_folders_are_native(family: Family, tmp_path: Path) -> None:
    """Also where text alone could be read by another class of the config."""
    model, inputs = built(family)
    model.save_pretrained(tmp_path)
    spec = foretoken.load(tmp_path, "lookup")
    assert isinstance(spec.target, NativeMediaModel)
    (out,) = spec.generate(inputs, max_new_tokens=NEW, gamma=2, ignore_eos=True)
    assert out.tokens == generated(model, inputs)


@pytest.mark.native
def test_a_folder_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network is loaded with the first picture, for the check, too; its decoder is dropped. In
    integers the text is another model's, the same with draft tokens."""
    model, inputs = built(gemma3, 1)  # no other test has this folder
    model.save_pretrained(tmp_path)
    checks, check = list[int](), stock_media.find_media_objection

    def counted(*given: Any) -> Any:
        checks.append(1)
        return check(*given)

    monkeypatch.setattr(stock_media, "find_media_objection", counted)
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


@pytest.mark.native
@pytest.mark.daily
@pytest.mark.parametrize("runtime", ["native", "transformers"])
@pytest.mark.parametrize("family", [llava, qwen2_5_vl, gemma3, qwen3_5])
def test_tokens_that_stand_for_pictures_are_text_where_they_are_generated(
    family: Family, runtime: str
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
        again = engine.add(inputs, begun=PartialOutput(begun.steps), max_new_tokens=8, **settings)
        other_row = engine.add([5, 6, 7], max_new_tokens=8, gamma=0, ignore_eos=True)
        while engine.running or engine.waiting:
            reasons |= {e.id: e.completion for e in engine.step() if e.finish_reason}
    assert reasons[again].finish_reason == "length"
    assert reasons[other_row].tokens == text.tokens
    assert reasons[again].tokens[:3] == begun.tokens


@pytest.mark.native
@pytest.mark.parametrize("first", [True, False])
def test_tokens_that_attend_to_the_last_one_are_refused(first: bool) -> None:
    """It is read by itself; a prompt that is refused leaves others as they are."""
    model, inputs = built(gemma3)
    spec, _ = loaded(model)
    wanted = generated(model, inputs)
    every = {**inputs, "token_type_ids": torch.ones_like(inputs["token_type_ids"])}
    for one in (every, inputs) if first else (inputs, every):
        if one is every:
            with pytest.raises(InputError, match="text must follow the media"):
                spec.generate(every, max_new_tokens=2)
        else:
            (out,) = spec.generate(inputs, max_new_tokens=NEW, gamma=2, ignore_eos=True)
            assert out.tokens == wanted


@pytest.mark.native
def test_masks_say_up_to_where_tokens_attend() -> None:
    n = 6
    causal = torch.ones(n, n).tril().bool()
    both = causal.clone()
    both[1:4, 1:4] = True
    assert find_attention_ends(None, n, None) is None
    assert find_attention_ends(torch.ones(1, n), n, None) is None
    assert find_attention_ends(causal[None, None], n, None) is None
    expected = [1, 4, 4, 4, 5, 6]
    found = find_attention_ends(both[None, None], n, None)
    assert found is not None
    assert found.tolist() == expected
    added = torch.where(both, 0.0, torch.finfo(torch.float32).min)[None, None]
    kinds = {"full_attention": added, "sliding_attention": added}
    found = find_attention_ends(kinds, n, 6)
    assert found is not None
    assert found.tolist() == expected
    holes = both.clone()
    holes[5, 2] = False
    for wrong in (holes[None, None], kinds | {"full_attention": causal[None, None]}):
        with pytest.raises(foretoken.ForetokenError, match="does not support"):
            find_attention_ends(wrong, n, None)


@pytest.mark.native
def test_a_folder_s_encoder_is_loaded_for_the_first_sound_and_shared(tmp_path: Path) -> None:
    model, inputs = built(whisper)
    model.save_pretrained(tmp_path / "target")
    relative(model).save_pretrained(tmp_path / "draft")
    for _ in range(2):  # the second time from the kept conversion
        spec = foretoken.load(tmp_path / "target", tmp_path / "draft", draft_dtype="int8")
        target, drafter = spec.target, cast(Any, spec.drafter)
        assert isinstance(target, NativeMediaDecoder)
        assert drafter.model.compute_dtype == "int8"
        assert "_network" not in vars(target)
        runs, network = list[int](), cast(nn.Module, target._network)
        network.get_encoder().register_forward_hook(lambda *_, runs=runs: runs.append(1))  # pyright: ignore
        (out,) = spec.generate(inputs, max_new_tokens=NEW, gamma=3, ignore_eos=True)
        assert out.tokens == generated(model, inputs)
        assert runs == [1] and "_network" not in vars(drafter.model)
        assert out.stats.encoder_seconds > 0 and any(step.accepted for step in out.steps)


@pytest.mark.native
def test_what_the_native_decoder_refuses() -> None:
    model, inputs = built(llava)
    spec, _ = loaded(model)
    ended = {**inputs, "input_ids": inputs["input_ids"][:, :-3]}
    assert ended["input_ids"][0, -1] == MARK
    heard, sound = built(whisper)
    hears = foretoken.load(heard, "lookup", runtime="native")
    for asked, given, says in (
        (spec, ended, "text must follow the media"),
        (spec, {**inputs, "speech": torch.zeros(1, 3)}, "does not take pixel_values, speech"),
        (
            hears,
            {**sound, "input_features": sound["input_features"][..., :30]},
            r"the shape \(1, 8, 30\), .* takes \(1, 8, 40\)",
        ),
        (
            hears,
            {**sound, "pixel_values": torch.zeros(1, 3, 4, 4)},
            "it takes only input_features, not pixel_values",
        ),
    ):
        with pytest.raises(InputError, match=says):
            asked.generate(given, max_new_tokens=2)
    with pytest.raises(RefusedError, match="layers with unknown modules"):
        foretoken.load(built(moonshine)[0], "lookup", runtime="native")
