"""Sounds of every kind become one channel at a model's rate, or are refused in one line."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from foretoken.errors import InputError
from foretoken.media.sounds import sound


def tone(rate: int, seconds: float = 0.5, hertz: float = 440.0) -> Any:
    return np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate).astype(np.float32)


def saved(samples: Any, rate: int, kind: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_files_of_several_kinds(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "tone"
    file.write_bytes(saved(tone(16_000), 16_000, kind))
    for value in (str(file), file, file.read_bytes()):
        read = sound(value, 16_000, "audio 0")
        assert read.dtype == np.float32 and abs(len(read) - 8000) < 2000
        assert 0.5 < np.abs(read).max() < 1.2


@pytest.mark.parametrize("rate", [8000, 11_025, 44_100, 48_000])
def test_other_rates_are_resampled(rate: int) -> None:
    """The tone stays at its height."""
    read = sound(saved(tone(rate), rate), 16_000, "audio 0")
    assert abs(len(read) - 8000) <= 1
    height = np.abs(np.fft.rfft(read)).argmax() * 16_000 / len(read)
    assert abs(height - 440) < 3


def test_channels_are_averaged() -> None:
    both = np.stack([tone(16_000), -tone(16_000)], 1)
    assert np.abs(sound(saved(both, 16_000), 16_000, "audio 0")).max() < 1e-3


def test_samples_themselves() -> None:
    read = sound(tone(16_000), 16_000, "audio 0")
    assert read.shape == (8000,)
    for kind in ("int16", "int32"):  # as files hold them
        whole = (tone(16_000).astype("float64") * np.iinfo(kind).max).astype(kind)
        assert np.allclose(sound(whole, 16_000, "audio 0"), read, atol=1e-4)
    headed = "DATA:audio/wav;BASE64," + base64.b64encode(saved(read, 16_000)).decode()
    assert len(sound(headed, 16_000, "audio 0")) == 8000


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
        (np.zeros(9, np.uint8), "an array of uint8; give floats, -1 to 1, or int16"),
        (np.zeros(9, bool), "an array of bool"),
    ],
)
def test_what_is_no_sound(value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        sound(value, 16_000, "audio 2")
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_samples_that_last_too_long() -> None:
    with pytest.raises(InputError, match="lasts 2 s, at most 1 go; cut it"):
        sound(tone(16_000, 2.0), 16_000, "audio 2", most=1)


def test_a_file_that_was_cut_is_read_as_far_as_it_goes() -> None:
    whole = saved(tone(16_000), 16_000)
    assert 3000 < len(sound(whole[: len(whole) // 2], 16_000, "audio 2")) <= 8000
