"""Speech to text by other models than Whisper: each window's text is that of transformers' own
`generate`, and windows are cut where it is quiet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import transformers as t
from tokenizers import Tokenizer, models, pre_tokenizers

import foretoken
from console import Run, mistake
from foretoken.errors import InputError, RefusedError
from foretoken.speech.transcription import can_time_words, can_transcribe, transcribe
from foretoken.speech.windows import DEFAULT_INSTRUCTION, split_windows
from foretoken.text.chat import process_media_chat
from media_models import (
    MARK,
    Made,
    V,
    built,
    canary,
    cohere_asr,
    granite_speech,
    llava,
    moonshine,
    qwen2_audio,
    qwen3_asr,
    relative,
)

RATE = 16_000
AUDIO = {"audio_token": "<audio>", "audio_bos_token": "<a>", "audio_eos_token": "</a>"}
COHERE = "<|startofcontext|> <|startoftranscript|> <|emo:undefined|> <|en|> <|pnc|> <|noitn|> "
COHERE += "<|notimestamp|> <|nodiarize|> ▁"
PARTS = (
    "{% for m in messages %} w8 {% for p in m.content %}{% if p.type == 'audio' %}<audio>"
    "{% else %} {{ p.text or p.source_language ~ ' ' ~ p.target_language }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def words() -> Any:
    """Whole words, so that texts can be read: w3 is the id 3."""
    names = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, V))]
    marks = [*AUDIO.values(), "<unk>", *COHERE.split()]
    names[MARK - len(marks) + 1 :] = reversed(marks)
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return t.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=AUDIO,
    )


def chat_ears() -> Any:
    """The processor of a Qwen2-Audio that hears a second."""
    extractor = t.WhisperFeatureExtractor(feature_size=8, hop_length=200, chunk_length=1)
    return t.Qwen2AudioProcessor(extractor, words(), chat_template=PARTS)


def spec_of(made: Made, processor: Any) -> foretoken.Speculator:
    model, _ = made
    return replace(foretoken.load(model, relative(model)), processor=lambda: processor)


def talk(seconds: float, *pauses: float) -> Any:
    """Noise with pauses of a fifth of a second."""
    samples = np.random.default_rng(0).normal(size=int(seconds * RATE)).astype(np.float32) / 10
    for pause in pauses:
        samples[int(pause * RATE) : int((pause + 0.2) * RATE)] = 0
    return samples


@pytest.fixture(scope="module")
def heard() -> foretoken.Speculator:
    """A Moonshine."""
    extractor = t.Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True)
    return spec_of(built(moonshine), t.Wav2Vec2Processor(extractor, words()))


def generated(spec: foretoken.Speculator, inputs: Any, begun: int, **more: Any) -> str:
    """The text of transformers' own `generate`."""
    network: Any = spec.target.model  # pyright: ignore
    assert spec.processor is not None
    ids = network.generate(**inputs, do_sample=False, **more)[0, begun:]
    return spec.processor().decode(ids.tolist(), skip_special_tokens=True).strip()


def test_sounds_are_cut_where_it_is_quiet() -> None:
    samples = talk(70, 24.0, 47.5)
    (_, first), (again, second), (last, end) = split_windows(samples, RATE, 30.0)
    assert (again, last, end) == (first, second, len(samples))
    assert 24.0 <= first / RATE <= 24.2 and 47.5 <= second / RATE <= 47.7
    assert split_windows(samples, RATE, 70.0) == [(0, len(samples))]
    for n in range(1, 200):  # never longer than asked, never tiny
        cut = split_windows(np.ones(n, np.float32), 10, 3.0)
        lengths = [end - begin for begin, end in cut]
        assert sum(lengths) == n and max(lengths) <= 30
        assert len(cut) == 1 or min(lengths) >= 7


@pytest.mark.parametrize("gamma", [0, 3])
def test_an_encoder_hears_each_window(heard: foretoken.Speculator, gamma: int) -> None:
    assert heard.processor is not None
    samples, processor = talk(40, 19.0), heard.processor()
    (_, cut), _ = split_windows(samples, RATE, 30.0)
    limit: Any = {"max_new_tokens": 20}
    heard.target.model.generation_config.max_new_tokens = 20  # pyright: ignore
    wanted = [
        generated(heard, processor(part, sampling_rate=RATE, return_tensors="pt"), 1, **limit)
        for part in (samples[:cut], samples[cut:])
    ]
    shares: list[float] = []
    texts: list[str] = []
    made = transcribe(heard, samples, gamma=gamma, progress=shares.append, on_text=texts.append)
    assert [s.text.strip() for s in made.segments] == wanted and wanted[0] != wanted[1]
    assert made.text == " ".join(wanted) == "".join(texts)
    assert [(s.start, s.end) for s in made.segments] == [
        (0.0, round(cut / RATE, 2)),
        (round(cut / RATE, 2), 40.0),
    ]
    assert shares == [cut / len(samples), 1.0] and texts.count("") > 4
    assert can_transcribe(heard) and not can_time_words(heard)


def test_texts_end_in_time_or_with_their_caller(heard: foretoken.Speculator) -> None:
    """Also where the model does not say when, and where a caller gives up."""
    heard.target.model.generation_config.max_new_tokens = None  # pyright: ignore
    (segment,) = transcribe(heard, talk(0.5)).segments
    assert len(segment.tokens) == 64 + 16

    def told(text: str) -> None:
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        transcribe(heard, talk(1), on_text=told)


def test_what_a_model_is_not_told(heard: foretoken.Speculator) -> None:
    for wish in ({"language": "en"}, {"prompt": "so"}, {"translate": True}):
        with pytest.raises(InputError, match=f"the model takes no {next(iter(wish))}; leave"):
            transcribe(heard, talk(1), **wish)
    with pytest.raises(RefusedError, match="does not return the times of words"):
        transcribe(heard, talk(1), words=True)


def test_a_processor_that_is_to_be_told_the_language() -> None:
    """Cohere's, which makes the decoder's prompt of it, and cuts sounds itself from 30 s on."""
    extractor = t.CohereAsrFeatureExtractor(feature_size=16)
    processor = t.CohereAsrProcessor(extractor, words())
    spec = spec_of(built(cohere_asr), processor)
    with pytest.raises(InputError, match="the model needs the language"):
        transcribe(spec, talk(1))
    with pytest.raises(InputError, match="Unsupported language: 'tlh'"):
        transcribe(spec, talk(1), language="tlh")
    inputs = processor(talk(2), "en", sampling_rate=RATE)
    del inputs["audio_chunk_index"]
    begun = inputs["decoder_input_ids"].shape[1] + 1
    spec.target.model.generation_config.max_new_tokens = 12  # pyright: ignore
    wanted = generated(spec, inputs, begun)
    assert transcribe(spec, talk(2), language="en", gamma=2).text == wanted
    made = transcribe(spec, talk(33), language="en", gamma=2)
    assert len(made.segments) == 2 and made.language == "en"


@pytest.mark.parametrize("family", [qwen3_asr, canary])
def test_a_request_of_the_processor(family: Any) -> None:
    """The language, its translation and what comes before go into the prompt."""
    if family is qwen3_asr:
        extractor: Any = t.Qwen3ASRFeatureExtractor(feature_size=8)
        processor: Any = t.Qwen3ASRProcessor(extractor, words(), chat_template=PARTS)
        asked, own = {"prompt": "w5 w6"}, {"prompt": "w5 w6"}
    else:
        extractor = t.ParakeetFeatureExtractor(feature_size=16)
        processor = t.CanaryProcessor(extractor, words(), chat_template=PARTS)
        asked, own = {"language": "de", "translate": True}, {}
        own = {"source_language": "de", "target_language": "en"}
    spec = spec_of(built(family), processor)
    samples = talk(2)
    inputs = processor.apply_transcription_request(audio=samples, **own)
    tensors = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    begun = tensors.get("decoder_input_ids", tensors.get("input_ids"))
    assert begun is not None
    count = begun.shape[1] + (family is canary)
    spec.target.model.generation_config.max_new_tokens = 20  # pyright: ignore
    wanted = generated(spec, tensors, count)
    for gamma in (0, 3):
        assert transcribe(spec, samples, gamma=gamma, **asked).text == wanted
    assert transcribe(spec, samples, temperature=1.0).seconds == 2


class GraniteEars(t.SequenceFeatureExtractor):
    """Reads sounds in the shapes of GraniteSpeechFeatureExtractor, which needs torchaudio: frames
    of 20 ms, of which a window of 4 becomes 2 tokens."""

    model_input_names = ["input_features"]

    def __call__(self, audios: Any, device: str = "cpu") -> t.BatchFeature:
        (samples,) = audios
        frames = torch.as_tensor(samples)[: len(samples) // 320 * 320].view(1, -1, 16, 20)
        count = -(-frames.shape[1] // 4) * 2
        mask = torch.ones(1, count).bool()
        features = frames.abs().mean(3).log()
        return t.BatchFeature(
            {"input_features": features, "audio_embed_sizes": [count], "input_features_mask": mask}
        )


STRINGS = "{% for m in messages %}{{ ' w8 ' + m['content'] }}{% endfor %}"


@pytest.mark.parametrize("family", [granite_speech, qwen2_audio])
def test_a_chat_model_is_asked_in_a_message(family: Any) -> None:
    """Granite's template knows texts alone: the sound is the processor's mark in one."""
    if family is granite_speech:
        processor: Any = t.GraniteSpeechProcessor(GraniteEars(16, RATE, 0.0), words())
        processor.tokenizer.chat_template = STRINGS
    else:
        processor = chat_ears()
    spec = spec_of(built(family), processor)
    samples = talk(0.9)
    spec.target.model.generation_config.max_new_tokens = 20  # pyright: ignore
    for prompt, said in ((None, DEFAULT_INSTRUCTION), ("w5 w6", "w5 w6")):
        if family is granite_speech:
            inputs = processor([f" w8 <audio>{said}"], [samples], return_tensors="pt")
        else:
            text = f" w8 <audio> {said}"
            inputs = processor(
                text=[text], audio=[samples], sampling_rate=RATE, return_tensors="pt"
            )
        tensors = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}
        wanted = generated(spec, tensors, tensors["input_ids"].shape[1])
        for gamma in (0, 3):
            assert transcribe(spec, samples, prompt=prompt, gamma=gamma).text == wanted
    with pytest.raises(InputError, match="the model takes no language"):
        transcribe(spec, samples, language="en")


@pytest.mark.native
def test_the_command_puts_a_chat_model_on_torch(tmp_path: Path, console: Run) -> None:
    (model, _), processor = built(qwen2_audio), chat_ears()
    model.save_pretrained(tmp_path / "m")
    processor.save_pretrained(tmp_path / "m")
    soundfile.write(tmp_path / "a.wav", talk(0.9), RATE)
    command = ["transcribe", str(tmp_path / "a.wav"), "--target", str(tmp_path / "m")]
    code, printed, _ = console(*command)
    assert code == 0 and printed.startswith("w")
    mistake(console(*command, "--dtype", "int8"), "which does not support --dtype int8")
    mistake(console("transcribe", "no.wav", *command[2:]), "there is no file no.wav")


LOOPS = (
    "{% for m in messages %}{% if m.content is string %} w8 {{ m.content }}{% else %} w8 "
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [STRINGS, LOOPS, {"default": LOOPS, "other": STRINGS}])
@pytest.mark.parametrize("owner", ["tokenizer", "processor"])
def test_templates_without_marks_for_sounds(owner: str, template: Any) -> None:
    processor: Any = t.GraniteSpeechProcessor(GraniteEars(16, RATE, 0.0), words())
    (processor if owner == "processor" else processor.tokenizer).chat_template = template
    parts = [{"type": "audio", "audio": talk(0.16)}, {"type": "text", "text": " w5"}]
    silent = [{"type": "text", "text": ""}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": silent}]
    named = ["other"] if isinstance(template, dict) else []
    for name in (None, *named):
        made = process_media_chat([*turns, {"role": "user", "content": "w6"}], processor, name)
        text = processor.tokenizer.decode(made["input_ids"][0])
        assert text.split() == ["w8", *["<audio>"] * 4, "w5", "w8", "w8", "w6"]
        assert made["input_features"].shape == (1, 8, 16)


def test_a_sound_of_which_the_end_would_be_dropped() -> None:
    processor = chat_ears()

    def message(seconds: float) -> Any:
        return [{"role": "user", "content": [{"type": "audio", "audio": talk(seconds)}]}]

    assert process_media_chat(message(1.0), processor)["input_features"].shape == (1, 8, 80)
    with pytest.raises(
        InputError, match="the audio lasts 3 s, but the model takes only the first 1 s"
    ):
        process_media_chat(message(3.0), processor)


def test_models_that_write_no_speech_down() -> None:
    tokens = words()
    model, _ = built(qwen2_audio)
    ears = t.Qwen2AudioProcessor(t.WhisperFeatureExtractor(feature_size=8), tokens)
    ears.chat_template = None
    spec = replace(foretoken.load(model, "lookup"), processor=lambda: ears)
    with pytest.raises(RefusedError, match="Qwen2Audio.*neither a request.*nor a chat template"):
        transcribe(spec, talk(1))
    model, _ = built(llava)
    eyes = t.LlavaProcessor(t.CLIPImageProcessorPil(), tokens)
    spec = replace(foretoken.load(model, "lookup"), processor=lambda: eyes)
    with pytest.raises(RefusedError, match="LlavaFor.*its processor takes no audio"):
        transcribe(spec, talk(1))
    assert not can_transcribe(spec)
