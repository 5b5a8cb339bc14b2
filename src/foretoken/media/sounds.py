"""Sounds as callers give them, to one channel of samples at the rate that a model hears."""

from __future__ import annotations

import io
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken.errors import InputError, to_one_line, format_value
from foretoken.media.data_urls import decoded, is_data_url

LEAST_RATE, MOST_RATE = 1000, 768_000  # Hz
BLOCK = 2**18  # samples that are read at a time
UNKNOWN = 2**63 - 1  # frames of a streamed file, whose header states no length
LOUDEST = 100.0  # full scale is 1: beyond this, samples are in another unit or damaged
VAGUE = (0, 1, 29)  # error codes of libsndfile with a meaningless message
GIVE = "give an audio file (WAV, FLAC, OGG, MP3), a data URL, or an array of samples"


def sound(value: Any, rate: int, place: str, most: float | None = None) -> NDArray[np.float32]:
    """Return samples `[n]` of a sound at `rate` Hz, its channels averaged.

    Args:
        value: A file's path, a file's bytes, a data URL, or an array of samples at that rate
            already, `[n]`: floats from -1 to 1, or integers of 16 or 32 bits with sign.
        rate: Samples a second.
        place: Where it stands, for errors.
        most: Seconds at most; None sets no limit.

    Raises:
        InputError: It is none of these, empty, longer than `most`, not finite, far beyond full
            scale, or cannot be decoded; soundfile is missing.

    Examples:
        >>> import numpy
        >>> sound(numpy.zeros(8000), 16000, "audio 0").shape
        (8000,)
    """
    if hasattr(value, "__array__"):
        samples, own = _floats(value, place), rate
        if most is not None and len(samples) > most * rate:
            raise _too_long(place, len(samples) / rate, most)
    else:
        samples, own = _read(value, place, most)
    if not len(samples):
        raise InputError(f"{place} holds no samples; give a sound")
    return samples if own == rate else _resampled(samples, own, rate)


def _read(value: Any, place: str, most: float | None) -> tuple[NDArray[np.float32], int]:
    """One channel of samples, and their rate."""
    try:
        import soundfile  # late: an extra
    except ImportError:
        raise InputError(f"{place} needs soundfile; pip install 'foretoken[media]'") from None
    if is_data_url(value):
        value = decoded(value, place)
    if isinstance(value, bytes):
        value = io.BytesIO(value)
    elif not isinstance(value, str | Path) or "://" in str(value):
        raise InputError(f"{place} is {format_value(value)}; {GIVE}")
    try:
        with soundfile.SoundFile(value) as file:
            rate = file.samplerate
            _require_length(file, place, most)
            samples = _decode(file, place, most)
    except InputError:
        raise
    except Exception as error:  # files hold anything
        if isinstance(value, str | Path) and not Path(value).is_file():
            problem = f"there is no file {value}"
        elif getattr(error, "code", None) in VAGUE:
            problem = "it is damaged, or not a sound in a known format"
        else:  # without the name of the object that holds the file
            problem = getattr(error, "error_string", "") or to_one_line(error)
            problem = problem.removeprefix("Error : ").rstrip(".")
        raise InputError(f"{place} cannot be read: {problem}; {GIVE}") from None
    return samples, rate


def _require_length(file: Any, place: str, most: float | None) -> None:
    """Raise InputError for an impossible sample rate or a stated duration beyond `most`."""
    rate = file.samplerate
    if not LEAST_RATE <= rate <= MOST_RATE:
        problem = f"{place} has {rate} samples a second"
        raise InputError(f"{problem}; give {LEAST_RATE} to {MOST_RATE}")
    if most is not None and most * rate < file.frames != UNKNOWN:
        raise _too_long(place, file.frames / rate, most)


def _decode(file: Any, place: str, most: float | None) -> NDArray[np.float32]:
    """Return the samples that are really in a file: a truncated one has fewer than its header
    states. `file.blocks()` would yield its whole uninitialized buffer then."""
    # else soundfile seeks after each read, which fails in a file of unknown length
    file.seekable = lambda: False
    parts, count = [np.zeros(0, np.float32)], 0
    while len(block := file.read(BLOCK, dtype="float32", always_2d=True)):
        _require_levels(block, place)
        # channels are averaged block by block: all of them may be more than memory holds
        parts.append(np.mean(block, 1))
        count += len(block)
        if most is not None and count > most * file.samplerate:
            raise _too_long(place, count / file.samplerate, most)
    return np.concatenate(parts)


def _require_levels(samples: NDArray[Any], place: str) -> None:
    """Raise InputError for samples that are not finite or far beyond full scale."""
    if not np.isfinite(samples).all():
        raise InputError(f"{place} holds samples that are not finite; give a sound")
    peak = max(samples.max(initial=0), -samples.min(initial=0))
    if peak > LOUDEST:
        raise InputError(f"{place} holds samples up to {peak:.3g}; scale them to -1 to 1")


def _too_long(place: str, seconds: float, most: float) -> InputError:
    return InputError(f"{place} lasts {seconds:.0f} s, at most {most:g} go; cut it")


def _floats(value: Any, place: str) -> NDArray[np.float32]:
    """Samples from -1 to 1; InputError for what is no channel of samples."""
    try:
        values = np.asarray(value)
    except Exception as error:  # a tensor with gradients, in bfloat16 or on a GPU
        problem = f"{place} cannot be taken as an array: {to_one_line(error)}"
        raise InputError(f"{problem}; give floats, -1 to 1, or int16") from None
    if values.ndim != 1:
        raise InputError(f"{place} has the shape {values.shape}; give one channel of samples")
    if values.dtype.kind == "f":
        _require_levels(values, place)
        return values.astype("float32")
    if str(values.dtype) not in ("int16", "int32"):  # nobody knows the range of others
        raise InputError(f"{place} is an array of {values.dtype}; give floats, -1 to 1, or int16")
    return (values / 2.0 ** (8 * values.itemsize - 1)).astype("float32")


def _resampled(samples: NDArray[np.float32], own: int, rate: int) -> NDArray[np.float32]:
    from scipy.signal import resample_poly  # late: takes a while

    common = gcd(own, rate)
    return resample_poly(samples, rate // common, own // common).astype("float32")
