"""Speech to text by a tiny random Whisper: windows, times and texts are those of transformers' own
`generate`, with a draft and without; and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

import foretoken
import speech
from console import Run, mistake
from foretoken.errors import InputError, RefusedError
from foretoken.transcription import Segment, Transcription, transcribe

RATE = 16_000


def noise(seconds: float, seed: int = 0, rate: int = RATE) -> Any:
    return np.random.default_rng(seed).normal(size=int(seconds * rate)).astype(np.float32) / 10


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return speech.whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def spec(folders: tuple[Path, Path]) -> foretoken.Speculator:
    return foretoken.load(*folders)


def by_transformers(spec: foretoken.Speculator, samples: Any) -> list[list[int]]:
    """The ids of the segments with text that transformers makes by itself."""
    assert spec.processor is not None
    network: Any = spec.target.model  # pyright: ignore
    processor = spec.processor()
    longer = len(samples) > 30 * RATE
    inputs = processor(
        samples,
        sampling_rate=RATE,
        return_tensors="pt",
        truncation=False,
        padding="longest" if longer else "max_length",
        return_attention_mask=True,
    )
    asked = {"language": "en", "task": "transcribe", "do_sample": False}
    made = network.generate(**inputs, **asked, return_timestamps=True, return_segments=True)
    pieces = [piece["tokens"].tolist() for piece in made["segments"][0]]
    tokenizer = processor.tokenizer
    return [p for p in pieces if tokenizer.decode(p, skip_special_tokens=True).strip()]


@pytest.mark.parametrize("seconds", [3, pytest.param(75, marks=pytest.mark.prove)])
def test_windows_and_texts_are_those_of_transformers(
    spec: foretoken.Speculator, seconds: float
) -> None:
    samples = noise(seconds)
    wanted = by_transformers(spec, samples)
    assert wanted
    for gamma in (0, 3):
        made = transcribe(spec, samples, language="en", gamma=gamma)
        assert [segment.tokens for segment in made.segments] == wanted
        assert made.seconds == seconds
        times = [(segment.start, segment.end) for segment in made.segments]
        assert all(0 <= start <= end for start, end in times) and times == sorted(times)


def test_progress_ends_with_the_sound(spec: foretoken.Speculator) -> None:
    shares: list[float] = []
    transcribe(spec, noise(40), language="en", progress=shares.append)
    assert shares == sorted(shares) and 0 <= shares[0] <= shares[-1] <= 1 and len(shares) > 1


def test_sampled_speech_and_a_language_that_the_model_hears(spec: foretoken.Speculator) -> None:
    assert transcribe(spec, noise(2), temperature=1.0).seconds == 2
    assert transcribe(spec, np.zeros(RATE, np.float32)).seconds == 1  # silence


def test_what_cannot_be_transcribed(spec: foretoken.Speculator) -> None:
    with pytest.raises(InputError, match="holds no samples"):
        transcribe(spec, np.zeros(0))
    with pytest.raises(InputError, match="cannot transcribe so"):
        transcribe(spec, noise(1), language="klingon")
    with pytest.raises(RefusedError, match="is no Whisper model"):
        transcribe(foretoken.load(), noise(1))


def test_the_command(
    folders: tuple[Path, Path], tmp_path: Path, console: Run, spec: foretoken.Speculator
) -> None:
    """Several files, of which one is broken; resumed; in every format."""
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
    assert code == 0 and "is there already" in said and (out / "long.txt").read_text() == "mine"
    code, printed, _ = console("transcribe", files[2], *options, "--format", "json")
    made = transcribe(spec, short, language="en")
    document = json.loads(printed)
    assert code == 0 and document["text"] == made.text and document["seconds"] == 1
    for form, begins in (("srt", "1\n00:00:"), ("vtt", "WEBVTT\n\n00:00:")):
        code, printed, _ = console("transcribe", files[2], *options, "--format", form)
        assert code == 0 and (not made.segments or printed.startswith(begins))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no model is given; give --target"),
        (["--target", "x", "--format", "doc"], "--format is 'doc'; give one of text, srt"),
        (["--target", "x", "b.wav", "--format", "srt"], "give --output"),
        (["--target", "x", "b/a.wav", "--output", "out"], "two files would be written"),
    ],
)
def test_mistakes_of_the_command(arguments: list[str], message: str, console: Run) -> None:
    mistake(console("transcribe", "a.wav", *arguments), message)


def test_subtitles() -> None:
    from foretoken.media.spoken import as_srt, as_vtt

    made = Transcription(
        4000.0, [Segment(0.0, 1.5, " Hello", []), Segment(3599.9996, 3661, "b", [])]
    )
    assert made.text == "Hellob"
    assert as_srt(made) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello\n\n2\n01:00:00,000 --> 01:01:01,000\nb\n"
    )
    assert as_vtt(made).startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello\n\n01:00:00.000")
