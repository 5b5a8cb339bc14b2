"""Sounds of every kind become one channel at a model's rate, or are refused in one line."""

from __future__ import annotations

import base64
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from foretoken.errors import InputError
from foretoken.media.audio import load_audio


def tone(rate: int, seconds: float = 0.5, hertz: float = 440.0) -> Any:
    return np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate).astype(np.float32)


def saved(samples: Any, rate: int, kind: str = "WAV", sub: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=sub)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_files_of_several_kinds(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "tone"
    file.write_bytes(saved(tone(16_000), 16_000, kind))
    for value in (str(file), file, file.read_bytes()):
        read = load_audio(value, 16_000, "audio 0")
        assert read.dtype == np.float32 and abs(len(read) - 8000) < 2000
        assert 0.5 < np.abs(read).max() < 1.2


@pytest.mark.parametrize("rate", [8000, 11_025, 48_000])
def test_other_rates_are_resampled_and_channels_averaged(rate: int) -> None:
    """The tone stays at its height."""
    read = load_audio(saved(tone(rate), rate), 16_000, "audio 0")
    assert abs(len(read) - 8000) <= 1
    height = np.abs(np.fft.rfft(read)).argmax() * 16_000 / len(read)
    assert abs(height - 440) < 3
    both = np.stack([tone(rate), -tone(rate)], 1)
    assert np.abs(load_audio(saved(both, rate), 16_000, "audio 0")).max() < 1e-3


def test_samples_themselves() -> None:
    read = load_audio(tone(16_000), 16_000, "audio 0")
    assert read.shape == (8000,)
    for kind in ("int16", "int32"):  # as files hold them
        whole = (tone(16_000).astype("float64") * np.iinfo(kind).max).astype(kind)
        assert np.allclose(load_audio(whole, 16_000, "audio 0"), read, atol=1e-4)
    headed = "DATA:audio/wav;BASE64," + base64.b64encode(saved(read, 16_000)).decode()
    assert len(load_audio(headed, 16_000, "audio 0")) == 8000


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (saved(np.zeros(0, np.float32), 16_000), "audio 2 holds no samples"),
        (saved(tone(16_000), 16_000)[:30], "audio 2 cannot be read"),
        (b"", "audio 2 cannot be read"),
        (b"no sound", "audio 2 cannot be read"),
        ("nowhere.wav", "audio 2 cannot be read"),
        ("data:audio/wav;base64," + base64.b64encode(b"x").decode(), "audio 2 cannot be read"),
        ("https://example.com/a.wav", "give an audio file"),
        (5, "give an audio file"),
        (np.zeros((2, 9)), "one channel"),
        (np.full(9, np.nan), "not finite"),
        (np.zeros(9, np.uint8), "an array of uint8; give floats from -1 to 1, or int16"),
        (np.zeros(9, bool), "an array of bool"),
        (torch.zeros(9, requires_grad=True), "audio 2 cannot be converted to an array"),
        (torch.zeros(9, dtype=torch.bfloat16), "audio 2 cannot be converted to an array"),
        (np.full(9, 1e300), r"samples up to 1e\+300; scale the samples to -1 to 1"),
        (tone(16_000) * 32_767, r"samples up to 3.28e\+04; scale the"),
        (saved(np.full((9, 4), 1e38), 16_000, sub="FLOAT"), r"samples up to 1e\+38; scale the"),
        (saved(np.full(9, np.nan), 16_000, sub="FLOAT"), "not finite"),
        (saved(tone(16_000), 16_000, "OGG")[:2000], "read: Supported file format but file is"),
    ],
)
def test_what_is_no_sound(value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        load_audio(value, 16_000, "audio 2")
    assert "\n" not in str(error.value) and len(str(error.value)) < 300
    assert " at 0x" not in str(error.value)


def test_a_file_that_was_cut_is_read_as_far_as_it_goes() -> None:
    whole = saved(tone(16_000), 16_000)
    assert 3000 < len(load_audio(whole[: len(whole) // 2], 16_000, "audio 2")) <= 8000
    with pytest.raises(InputError, match="lasts 2 s, the limit is 1 s"):
        load_audio(tone(16_000, 2.0), 16_000, "audio 2", max_seconds=1)


def test_a_cut_mp3_holds_no_sound_of_another() -> None:
    """Its header states the length of the whole; what is missing was left in memory by others."""
    whole = saved(np.zeros(160_000, np.float32), 16_000, "MP3")
    cut = whole[: len(whole) // 2]
    with soundfile.SoundFile(io.BytesIO(cut)) as file:
        stated, held = file.frames, len(file.read())
    assert held < 0.6 * stated
    load_audio(saved(np.full(192_000, 0.25, np.float32), 16_000), 16_000, "audio 2")
    read = load_audio(cut, 16_000, "audio 2", max_seconds=10)
    assert len(read) == held and not read.any()


@pytest.mark.parametrize("stated", [0, 2**36 - 1])
def test_the_length_of_a_sound_is_that_of_its_samples(stated: int) -> None:
    """A FLAC file that was written as a stream states none."""
    whole = bytearray(saved(tone(16_000, 2.0), 16_000, "FLAC"))
    whole[21] = whole[21] & 0xF0 | stated >> 32
    whole[22:26] = (stated % 2**32).to_bytes(4, "big")
    assert len(load_audio(bytes(whole), 16_000, "audio 2")) == 32_000
    with pytest.raises(InputError, match="the limit is 1 s"):
        load_audio(bytes(whole), 16_000, "audio 2", max_seconds=1)
    if not stated:
        assert len(load_audio(bytes(whole), 16_000, "audio 2", max_seconds=2)) == 32_000


DAMAGED = """
import hashlib, sys
from pathlib import Path
from foretoken.errors import InputError
from foretoken.media.audio import load_audio

for file in sorted(Path(sys.argv[1]).iterdir()):
    try:
        samples = load_audio(file.read_bytes(), 16_000, "audio 0", 60)
        print(file.name, len(samples), hashlib.sha256(samples.tobytes()).hexdigest())
    except InputError as error:
        print(file.name, error)
"""


def test_damaged_files_never_show_memory_that_nobody_set(tmp_path: Path) -> None:
    """glibc fills memory with the byte that it is given: what is decoded does not depend on it."""
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.2, (30_000, 2))
    forms = [("WAV", "IMA_ADPCM"), ("WAV", "PCM_24"), ("FLAC", None), ("OGG", "VORBIS")]
    for kind, sub in [*forms, ("OGG", "OPUS"), ("MP3", None), ("AIFF", None)]:
        whole = saved(noise, 16_000, kind, sub)
        for i, end in enumerate(rng.integers(len(whole) // 8, len(whole), 6)):
            damaged = bytearray(whole[:end] if i % 2 else whole)
            for at in rng.integers(0, len(damaged), i):
                damaged[at] ^= 0xA5
            (tmp_path / f"{kind}-{sub}-{i}").write_bytes(damaged)
    read = [
        subprocess.run(
            [sys.executable, "-c", DAMAGED, str(tmp_path)],
            env=os.environ | {"MALLOC_PERTURB_": fill},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for fill in ("85", "170")
    ]
    assert read[0] == read[1] and read[0].count("\n") == 42
    assert sum(line.split()[1].isdigit() for line in read[0].splitlines()) > 15
