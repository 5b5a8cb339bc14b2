"""Speech to text by a tiny random Whisper: windows, times of pieces and words, silence and texts
are those of transformers' own `generate`, with a draft and without; and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import transformers as t
from transformers import WhisperForConditionalGeneration, WhisperProcessor

import foretoken
import speech
from console import Run, mistake
from foretoken.errors import InputError, RefusedError
from foretoken.media.transcripts import to_srt, to_vtt
from foretoken.models.native.encoder_decoder import NativeMediaDecoder
from foretoken.models.stock import media
from foretoken.speech.transcription import Segment, Transcription, transcribe
from foretoken.speech.word_times import WordTimer

RATE = 16_000


def noise(seconds: float, seed: int = 0, rate: int = RATE) -> Any:
    return np.random.default_rng(seed).normal(size=int(seconds * rate)).astype(np.float32) / 10


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return speech.whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def spec(folders: tuple[Path, Path]) -> foretoken.Speculator:
    return foretoken.load(*folders, runtime="transformers")


def features(processor: Any, samples: Any) -> Any:
    """What the processor makes of a sound of any length."""
    return processor(
        samples,
        sampling_rate=RATE,
        return_tensors="pt",
        truncation=False,
        padding="longest" if len(samples) > 30 * RATE else "max_length",
        return_attention_mask=True,
    )


def by_transformers(
    folder: Path, samples: Any, language: str | None = "en", **more: Any
) -> list[list[int]]:
    """The ids of the segments with text that transformers makes by itself."""
    network: Any = WhisperForConditionalGeneration.from_pretrained(folder)
    processor = WhisperProcessor.from_pretrained(folder)
    inputs = features(processor, samples)
    asked = {"language": language, "task": "transcribe", "do_sample": False, **more}
    made = network.generate(**inputs, **asked, return_timestamps=True, return_segments=True)
    pieces = [piece["tokens"].tolist() for piece in made["segments"][0]]
    tokenizer = processor.tokenizer
    return [p for p in pieces if tokenizer.decode(p, skip_special_tokens=True).strip()]


@pytest.mark.parametrize(
    "seconds", [3, *(pytest.param(n, marks=pytest.mark.prove) for n in (75, 1200))]
)
def test_windows_and_texts_are_those_of_transformers(
    spec: foretoken.Speculator, folders: tuple[Path, Path], seconds: float
) -> None:
    samples = noise(seconds)
    wanted = by_transformers(folders[0], samples)
    assert wanted
    for gamma in (0, 3):
        made = transcribe(spec, samples, language="en", gamma=gamma)
        assert [segment.tokens for segment in made.segments] == wanted
        assert made.seconds == seconds
        times = [(segment.start, segment.end) for segment in made.segments]
        assert all(0 <= start <= end for start, end in times) and times == sorted(times)


@pytest.mark.prove
@pytest.mark.native
def test_the_same_on_the_native_decoder(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where transformers' `generate` has no weights; a language is heard in the first window, which
    is read once."""
    spec, samples = foretoken.load(*folders), noise(3)
    assert isinstance(spec.target, NativeMediaDecoder)
    runs, heard, counts = list[int](), media.encode_without_padding, list[int]()
    monkeypatch.setattr(
        media, "encode_without_padding", lambda *args: (runs.append(1), heard(*args))[1]
    )
    for language in ("en", None):
        made = transcribe(spec, samples, language=language, gamma=3)
        wanted = by_transformers(folders[0], samples, language)
        assert [segment.tokens for segment in made.segments] == wanted and wanted
        counts.append(len(runs))
    assert counts[1] == 2 * counts[0]


def test_progress_sampled_speech_and_silence(spec: foretoken.Speculator) -> None:
    """Progress ends with the sound; without a language the model hears which."""
    shares: list[float] = []
    transcribe(spec, noise(31), language="en", progress=shares.append)
    assert shares == sorted(shares) and 0 <= shares[0] <= shares[-1] <= 1 and len(shares) > 1
    assert transcribe(spec, noise(2), temperature=1.0).seconds == 2
    assert transcribe(spec, np.zeros(RATE, np.float32)).seconds == 1  # silence


def test_what_cannot_be_transcribed(spec: foretoken.Speculator) -> None:
    with pytest.raises(InputError, match="holds no samples"):
        transcribe(spec, np.zeros(0))
    with pytest.raises(InputError, match="cannot transcribe this"):
        transcribe(spec, noise(1), language="klingon")
    with pytest.raises(InputError, match="language is 5"):
        transcribe(spec, noise(1), language=5)  # pyright: ignore[reportArgumentType]
    assert transcribe(spec, noise(1), prompt="", language="") == transcribe(spec, noise(1))
    with pytest.raises(InputError, match=r"prompt contains <\|en\|>, a special token"):
        transcribe(spec, noise(1), prompt="so <|en|>")
    with pytest.raises(RefusedError, match="transcribe speech: its folder has no processor"):
        transcribe(foretoken.load(), noise(1))


def test_words_have_the_times_of_transformers(
    folders: tuple[Path, Path], spec: foretoken.Speculator
) -> None:
    """Of a long sound, so that windows begin within it; the target stays as it is."""
    assert spec.processor is not None
    network: Any = t.WhisperForConditionalGeneration.from_pretrained(folders[0])
    samples = noise(31)
    inputs = features(spec.processor(), samples)
    asked = {"language": "en", "do_sample": False, "return_timestamps": True}
    theirs = network.generate(
        **inputs, **asked, return_segments=True, return_token_timestamps=True
    )["segments"][0]
    target: Any = spec.target
    timed = WordTimer(spec, target.model, int(inputs["attention_mask"].sum()), None)

    def begun(done: Any) -> None:
        timed.seek = int(done[0, 0])

    ours = target.model.generate(
        **inputs, **asked, return_segments=True, custom_generate=timed, monitor_progress=begun
    )["segments"][0]
    for own, their in zip(ours, theirs, strict=True):
        assert own["tokens"].tolist() == their["tokens"].tolist()
        times = own["result"]["token_timestamps"][slice(*own["idxs"])]
        assert torch.allclose(times.float(), their["token_timestamps"].float(), atol=1e-4)
    assert target.model.config._attn_implementation == "sdpa"

    texts: list[str] = []
    made = transcribe(spec, samples, language="en", words=True, gamma=3, on_text=texts.append)
    assert made.language == "en" and "".join(texts).strip() == made.text
    plain = transcribe(spec, samples, language="en")
    assert made.segments and [s.tokens for s in made.segments] == [s.tokens for s in plain.segments]
    for segment in made.segments:
        assert segment.words
        joined = "".join(word.text for word in segment.words)
        assert joined == "".join(segment.text.split())
        ends = [time for word in segment.words for time in (word.start, word.end)]
        assert ends == sorted(ends) and 0 <= ends[0] <= ends[-1] <= 31


def test_text_that_comes_before(folders: tuple[Path, Path], spec: foretoken.Speculator) -> None:
    """It is read before each window, its end where it is too long."""
    assert spec.processor is not None
    samples, processor = noise(2), spec.processor()
    ids = processor.get_prompt_ids("Two captains", return_tensors="pt")
    wanted = by_transformers(folders[0], samples, prompt_ids=ids)
    own = transcribe(spec, samples, language="en", prompt="Two captains", gamma=3)
    assert [s.tokens for s in own.segments] == wanted
    assert transcribe(spec, samples, language="en", prompt="so " * 500).seconds == 2


@pytest.mark.parametrize("silent", [True, pytest.param(False, marks=pytest.mark.prove)])
def test_silence_is_detected_as_by_transformers(spec: foretoken.Speculator, silent: bool) -> None:
    """What is silent has no pieces. A threshold of likelihood makes windows fall back."""
    target: Any = spec.target
    assert spec.processor is not None
    inputs = features(spec.processor(), noise(2))
    asked: dict[str, Any] = {"language": "en", "return_timestamps": True, "return_segments": True}
    asked |= {"no_speech_threshold": 0.0 if silent else 1.0, "logprob_threshold": -0.01}
    asked |= {"temperature": (0.0, 0.0), "compression_ratio_threshold": 1.35}
    theirs = target.model.generate(**inputs, **asked)["segments"][0]
    ours = target.model.generate(**inputs, **asked, custom_generate=spec)["segments"][0]
    assert [p["tokens"].tolist() for p in ours] == [p["tokens"].tolist() for p in theirs]
    assert bool(ours) != silent


def test_the_command(
    folders: tuple[Path, Path], tmp_path: Path, console: Run, spec: foretoken.Speculator
) -> None:
    """Several files, of which one is broken; resumed; as JSON."""
    target, draft = map(str, folders)
    long, short = tmp_path / "long.wav", tmp_path / "short.wav"
    soundfile.write(long, np.stack([noise(2, rate=8000)] * 2, 1), 8000)
    soundfile.write(short, noise(1), RATE)
    (tmp_path / "broken.wav").write_bytes(short.read_bytes()[:20])
    files = [str(tmp_path / name) for name in ("long.wav", "broken.wav", "short.wav")]
    options = ["--target", target, "--draft", draft, "--language", "en"]
    out = tmp_path / "out"
    code, printed, said = console("transcribe", *files, *options, "--output", out)
    assert code == 1 and not printed
    assert "broken.wav: the audio cannot be read" in said
    assert sorted(p.name for p in out.iterdir()) == ["long.txt", "short.txt"]
    (out / "long.txt").write_text("mine")
    code, _, said = console("transcribe", files[0], *options, "--output", out)
    assert code == 0 and "exists already" in said and (out / "long.txt").read_text() == "mine"
    code, printed, _ = console("transcribe", files[2], *options, "--format", "json")
    made = transcribe(spec, short, language="en")
    document = json.loads(printed)
    assert code == 0 and document["text"] == made.text and document["seconds"] == 1
    assert all(segment["words"] for segment in document["segments"])
    code, printed, _ = console("transcribe", files[0], files[2], *options)
    first, second = printed.split(f"==> {files[2]} <==\n")
    assert code == 0 and first.startswith(f"==> {files[0]} <==\n") and second.strip()


def test_mistakes_of_the_command(console: Run) -> None:
    for arguments, message in (
        ("", "no model is given; give --target"),
        ("--target x --format doc", "--format is 'doc'; give one of text, srt"),
        ("--target x b.wav --format srt", "give --output"),
        ("--target x b/a.wav --output out", "two audio files have the output file"),
        ("--target x --output /proc/x", "--output is /proc/x, which cannot be created"),
    ):
        mistake(console("transcribe", "a.wav", *arguments.split()), message)


def test_subtitles() -> None:
    made = Transcription(
        4000.0, [Segment(0.0, 1.5, " Hello", []), Segment(3599.9996, 3661, "b", [])]
    )
    assert made.text == "Hellob"
    assert to_srt(made) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello\n\n2\n01:00:00,000 --> 01:01:01,000\nb\n"
    )
    assert to_vtt(made).startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello\n\n01:00:00.000")
