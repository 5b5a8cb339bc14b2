"""Prompts with pictures and sounds: texts are those of the family's own `generate`, with draft
tokens and without, alone and in a batch; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as t
from transformers.generation.utils import GenerationMixin

import foretoken
from foretoken.errors import ForeignError, InputError
from foretoken.media.inputs import media_of
from foretoken.models.stock import media as stock_media
from foretoken.options import as_list
from media_models import (
    DECODERS,
    ENCODERS,
    LAYERS,
    MARK,
    PATCHES,
    Made,
    built,
    canary,
    cohere_asr,
    ids,
    lfm2_vl,
    llava,
    moonshine,
    other,
    pixels,
    qwen3_5,
    relative,
    speech2text,
    vibevoice_asr,
    whisper,
)
from media_models import TEXT as SIZES
from oracle import random_model
from table import TableModel
from tiny import llama

FAMILIES = [*DECODERS, *ENCODERS]
QUICK = {"llava", "qwen3_5", "whisper", "canary"}
EACH = [
    pytest.param(f, id=f.__name__, marks=[] if f.__name__ in QUICK else pytest.mark.prove)
    for f in FAMILIES
]
NEW, TEXT = 12, [1, 5, 6, 7]


def generated(model: Any, inputs: Any, **more: Any) -> list[int]:
    """The new tokens of transformers' own greedy `generate`."""
    begun = inputs.get("decoder_input_ids") if model.config.is_encoder_decoder else None
    begun = inputs["input_ids"] if begun is None else begun
    if model.config.is_encoder_decoder and "decoder_input_ids" not in inputs:
        begun = torch.zeros(1, 1)
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    mixin: Any = GenerationMixin
    return mixin.generate(model, **inputs, **settings, **more)[0, begun.shape[1] :].tolist()


@pytest.mark.parametrize("family", EACH)
def test_logits_are_those_of_generate(family: Callable[[], Made]) -> None:
    model, inputs = built(family)
    target: Any = foretoken.load(model, "lookup").target
    (media,) = media_of(inputs, encodes=model.config.is_encoder_decoder)
    assert target.objection(media) is None
    assert stock_media.deviation(model, target, media) < 1e-5


@pytest.mark.parametrize("family", EACH)
def test_texts_are_those_of_generate(family: Callable[[], Made]) -> None:
    model, inputs = built(family)
    changed = other(inputs)
    spec = foretoken.load(model, relative(model))
    wanted = [generated(model, inputs), generated(model, changed)]
    for gamma in (0, 1, 4):
        both: Any = [inputs, changed]
        completions = spec.generate(both, max_new_tokens=NEW, gamma=gamma, ignore_eos=True)
        assert [c.tokens for c in completions] == wanted
        again = generated(model, inputs, custom_generate=spec, num_assistant_tokens=gamma)
        assert again == wanted[0]
    assert any(step.accepted for c in completions for step in c.steps)


def test_another_picture_makes_another_text() -> None:
    """Otherwise the tests above would show nothing."""
    for family in (llava, whisper):
        model, inputs = built(family)
        assert generated(model, inputs) != generated(model, other(inputs))


def test_rows_with_pictures_and_without_share_a_batch() -> None:
    """Rows of text join a batch of rows with pictures, in any order, and leave it."""
    model, inputs = built(llava)
    spec = foretoken.load(model, relative(model))
    (media,) = spec.inputs.prompts(inputs)
    prompts: list[Any] = [TEXT, media, [1, 9], media]
    limits = [foretoken.SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (12, 3, 7, 12)]
    requests = spec.inputs.requests(prompts, limits, 0)
    rows = spec.inputs.rows(requests)
    verifier = foretoken.options.check(3, "block", 1.0)
    texts = [c.tokens for c in spec.completions(rows, verifier, 3)]
    picture = generated(model, inputs)
    alone = [generated(model, {"input_ids": torch.tensor([p])}) for p in (TEXT, [1, 9])]
    assert texts == [alone[0], picture[:3], alone[1][:7], picture]


def test_a_draft_that_reads_ids_only() -> None:
    """It sees the text, with the ids that stand for the picture; the text stays the target's."""
    model, inputs = built(llava)
    spec = foretoken.load(model, llama(100, 256), same_tokenizer=True)
    (out,) = spec.generate(inputs, max_new_tokens=NEW, gamma=3, ignore_eos=True)
    assert out.tokens == generated(model, inputs)
    assert any(step.drafted for step in out.steps)
    (copied,) = foretoken.load(model, "lookup").generate(
        inputs, max_new_tokens=NEW, gamma=3, ignore_eos=True
    )
    assert copied.tokens == out.tokens


@pytest.mark.daily("qwen3_5")
@pytest.mark.parametrize("family", [qwen3_5, lfm2_vl])
def test_a_hybrid_with_more_tokens_than_a_pass(family: Callable[[], Made]) -> None:
    """Its states follow from a few tokens at a time."""
    model, inputs = built(family)
    text = torch.arange(300)[None] % 80 + 3
    prompt = torch.cat([text, inputs["input_ids"], text], 1)
    inputs = {**inputs, "input_ids": prompt}
    if "mm_token_type_ids" in inputs:
        inputs["mm_token_type_ids"] = (prompt == MARK).long()
    for config in (model.config, model.config.get_text_config()):
        config.max_position_embeddings = 1000
    spec = foretoken.load(model, relative(model))
    for gamma in (0, 3):
        (out,) = spec.generate(inputs, max_new_tokens=NEW, gamma=gamma, ignore_eos=True)
        assert out.tokens == generated(model, inputs)


def test_a_draft_whose_context_is_too_short_is_silent() -> None:
    model, inputs = built(llava)
    draft = relative(model)
    draft.config.get_text_config().max_position_embeddings = 8
    (out,) = foretoken.load(model, draft).generate(
        inputs, max_new_tokens=NEW, gamma=3, ignore_eos=True
    )
    assert out.tokens == generated(model, inputs) and not any(step.drafted for step in out.steps)


@pytest.mark.daily("moonshine")
@pytest.mark.parametrize("family", [speech2text, moonshine, canary, cohere_asr])
def test_padding_of_sounds_is_not_heard(family: Callable[[], Made]) -> None:
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
        with pytest.raises(InputError, match="is text alone, and the target"):
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
    model, inputs = built(llava)
    short, long = inputs["input_ids"], torch.cat([inputs["input_ids"], torch.tensor([[8, 4]])], 1)
    padded = torch.cat([torch.zeros(1, 2, dtype=torch.long), short], 1)
    both = {
        "input_ids": torch.cat([padded, long]),
        "attention_mask": torch.tensor([[0, 0] + [1] * short.shape[1], [1] * long.shape[1]]),
        "pixel_values": torch.cat([inputs["pixel_values"], other(inputs)["pixel_values"]]),
    }
    spec = foretoken.load(model, "lookup")
    texts = [c.tokens for c in spec.generate(both, max_new_tokens=NEW, ignore_eos=True)]
    assert texts[0] == generated(model, inputs)
    assert texts[1] == generated(model, {**other(inputs), "input_ids": long})


def test_texts_and_outputs_with_and_without_pictures_in_one_list() -> None:
    model, inputs = built(llava)
    spec = foretoken.load(model, "lookup")
    plain = {"input_ids": torch.tensor([[0, 4, 5]]), "attention_mask": torch.tensor([[0, 1, 1]])}
    mixed: Any = [inputs, [4, 5], plain]
    texts = [c.tokens for c in spec.generate(mixed, max_new_tokens=NEW, ignore_eos=True)]
    assert texts[0] == generated(model, inputs) and texts[1] == texts[2] != texts[0]
    alone: Any = [plain]
    assert spec.generate(alone, max_new_tokens=NEW, ignore_eos=True)[0].tokens == texts[1]


def test_a_mask_of_frames_is_not_cut_like_text() -> None:
    ids = torch.tensor([[0, 4, 5], [6, 7, 8]])
    output = {"input_ids": ids, "attention_mask": (ids > 0).long(), "token_type_ids": ids}
    made = media_of(output | {"feature_attention_mask": torch.ones(2, 3)}, encodes=False)
    first = {name: tuple(x.shape) for name, x in made[0].inputs.items()}
    assert first == {"token_type_ids": (1, 2), "feature_attention_mask": (1, 3)}


def test_calls_of_generate_that_cannot_be_decoded() -> None:
    """Pictures of several rows, which transformers' own `generate` has read already, and a target
    that reads ids only."""
    model, inputs = built(llava)
    both: Any = {name: torch.cat([x, x]) for name, x in inputs.items()}
    with pytest.raises(ForeignError, match="are of 2 rows; call generate for each"):
        model.generate(**both, max_new_tokens=2, custom_generate=foretoken.load(model, "lookup"))
    spec = foretoken.attach(model, draft="lookup")
    assert model.generate(**both, max_new_tokens=NEW, do_sample=False).shape == (
        2,
        inputs["input_ids"].shape[1] + NEW,
    )
    foretoken.detach(model)
    converted = replace(spec, target=TableModel(random_model(1, 100), 100))
    with pytest.raises(ForeignError, match="cannot be read by the target on .*: it reads ids only"):
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
    model, inputs = built(llava)
    spec = foretoken.load(model, "lookup")
    both = {name: torch.cat([x, x]) for name, x in inputs.items()}
    with pytest.raises(InputError, match=message):
        spec.generate(both | changed, max_new_tokens=2)


def test_targets_that_do_not_read_media() -> None:
    spec, (_, inputs) = foretoken.load(llama(100, 256), "lookup"), built(llava)
    with pytest.raises(InputError, match="LlamaForCausalLM does not take pixel_values; give text"):
        spec.generate(inputs, max_new_tokens=2)
    converted = replace(spec, target=TableModel(random_model(1, 100), 100))
    with pytest.raises(
        InputError, match="reads ids only; give text, or load a model that reads them, with"
    ):
        converted.generate(inputs, max_new_tokens=2)


def test_pictures_where_ids_alone_are_read() -> None:
    """They are refused, not left out: a certificate is of texts."""
    _, inputs = built(llava)
    with pytest.raises(InputError, match="prompts hold pixel_values, and ids alone are read here"):
        as_list(inputs)


@pytest.mark.parametrize("family", [llava, whisper])
def test_an_engine_with_little_memory(family: Callable[[], Made]) -> None:
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


def test_text_for_an_encoder_of_sounds() -> None:
    model, _ = built(whisper)
    with pytest.raises(InputError, match="text alone, and the target reads pictures or sounds"):
        foretoken.load(model, "lookup").generate([[4, 5]], max_new_tokens=2)


def test_likelihoods_of_a_prompt_with_a_picture() -> None:
    model, inputs = built(llava)
    with pytest.raises(InputError, match="prompt_logprobs"):
        foretoken.load(model, "lookup").generate(inputs, max_new_tokens=2, prompt_logprobs=1)
