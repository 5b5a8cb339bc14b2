"""Loads audio from files, bytes, data URLs and arrays as mono samples at a model's rate."""

from __future__ import annotations

import io
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken.errors import InputError, format_value, to_one_line
from foretoken.media.data_urls import decode_data_url, is_data_url

MIN_SAMPLING_RATE, MAX_SAMPLING_RATE = 1000, 768_000  # Hz
BLOCK_FRAMES = 2**18  # frames that are decoded at a time
UNKNOWN_FRAMES = 2**63 - 1  # in the header of a streamed file, whose length is unknown
MAX_LEVEL = 100.0  # full scale is 1: larger samples are in another unit or damaged
VAGUE_ERROR_CODES = (0, 1, 29)  # error codes of libsndfile with a meaningless message
AUDIO_REMEDY = "give an audio file (WAV, FLAC, OGG, MP3), a data URL, or an array of samples"


def load_audio(
    value: Any, sampling_rate: int, label: str, max_seconds: float | None = None
) -> NDArray[np.float32]:
    """Return samples `[n]` of audio at `sampling_rate` Hz, with channels averaged.

    Args:
        value: A file's path, a file's bytes, a data URL, or an array of samples `[n]` at this
            rate: floats from -1 to 1, or int16 or int32.
        sampling_rate: Samples a second.
        label: Name of the value in error messages.
        max_seconds: Maximum duration; None sets no limit.

    Raises:
        InputError: `value` is none of these, cannot be decoded, is empty or longer than
            `max_seconds`, or has samples that are not finite or far beyond full scale; or soundfile
            is missing.

    Examples:
        >>> import numpy
        >>> load_audio(numpy.zeros(8000), 16000, "audio 0").shape
        (8000,)
    """
    if hasattr(value, "__array__"):
        samples, source_rate = _to_floats(value, label), sampling_rate
        if max_seconds is not None and len(samples) > max_seconds * sampling_rate:
            raise _make_length_error(label, len(samples) / sampling_rate, max_seconds)
    else:
        samples, source_rate = _read_file(value, label, max_seconds)
    if not len(samples):
        raise InputError(f"{label} holds no samples; give audio with at least one sample")
    return (
        samples if source_rate == sampling_rate else _resample(samples, source_rate, sampling_rate)
    )


def _read_file(
    value: Any, label: str, max_seconds: float | None
) -> tuple[NDArray[np.float32], int]:
    """Return the samples of a file, with channels averaged, and their rate."""
    try:
        import soundfile  # imported late: an extra
    except ImportError:
        raise InputError(f"{label} needs soundfile; pip install 'foretoken[media]'") from None
    if is_data_url(value):
        value = decode_data_url(value, label)
    if isinstance(value, bytes):
        value = io.BytesIO(value)
    elif not isinstance(value, str | Path) or "://" in str(value):
        raise InputError(f"{label} is {format_value(value)}; {AUDIO_REMEDY}")
    try:
        with soundfile.SoundFile(value) as file:
            rate = file.samplerate
            _require_length(file, label, max_seconds)
            samples = _decode(file, label, max_seconds)
    except InputError:
        raise
    except Exception as error:  # a damaged file raises any type
        if isinstance(value, str | Path) and not Path(value).is_file():
            problem = f"there is no file {value}"
        elif getattr(error, "code", None) in VAGUE_ERROR_CODES:
            problem = "it is damaged, or not in a known audio format"
        else:  # soundfile's message without the name of the object that holds the file
            problem = getattr(error, "error_string", "") or to_one_line(error)
            problem = problem.removeprefix("Error : ").rstrip(".")
        raise InputError(f"{label} cannot be read: {problem}; {AUDIO_REMEDY}") from None
    return samples, rate


def _require_length(file: Any, label: str, max_seconds: float | None) -> None:
    """Raise InputError for an impossible sampling rate or a stated duration over `max_seconds`."""
    rate = file.samplerate
    if not MIN_SAMPLING_RATE <= rate <= MAX_SAMPLING_RATE:
        problem = f"{label} has {rate} samples a second"
        raise InputError(f"{problem}; give {MIN_SAMPLING_RATE} to {MAX_SAMPLING_RATE}")
    if max_seconds is not None and max_seconds * rate < file.frames != UNKNOWN_FRAMES:
        raise _make_length_error(label, file.frames / rate, max_seconds)


def _decode(file: Any, label: str, max_seconds: float | None) -> NDArray[np.float32]:
    """Return the samples that a file really holds, with channels averaged. A truncated file holds
    fewer samples than its header states; `file.blocks()` would yield uninitialized memory for the
    rest."""
    # otherwise soundfile seeks after each read, which fails in a file of unknown length
    file.seekable = lambda: False
    parts, count = [np.zeros(0, np.float32)], 0
    while len(block := file.read(BLOCK_FRAMES, dtype="float32", always_2d=True)):
        _require_levels(block, label)
        # channels are averaged block by block: memory may not hold all of them
        parts.append(np.mean(block, 1))
        count += len(block)
        if max_seconds is not None and count > max_seconds * file.samplerate:
            raise _make_length_error(label, count / file.samplerate, max_seconds)
    return np.concatenate(parts)


def _require_levels(samples: NDArray[Any], label: str) -> None:
    """Raise InputError for samples that are non-finite or far beyond full scale."""
    if not np.isfinite(samples).all():
        raise InputError(f"{label} holds samples that are not finite; give finite samples")
    peak = max(samples.max(initial=0), -samples.min(initial=0))
    if peak > MAX_LEVEL:
        raise InputError(f"{label} holds samples up to {peak:.3g}; scale the samples to -1 to 1")


def _make_length_error(label: str, seconds: float, max_seconds: float) -> InputError:
    return InputError(f"{label} lasts {seconds:.0f} s, the limit is {max_seconds:g} s; shorten it")


def _to_floats(value: Any, label: str) -> NDArray[np.float32]:
    """Return samples from -1 to 1. Raises InputError if the value is not one channel of samples."""
    try:
        values = np.asarray(value)
    except Exception as error:  # a tensor with gradients, in bfloat16 or on a GPU
        problem = f"{label} cannot be converted to an array: {to_one_line(error)}"
        raise InputError(f"{problem}; give floats from -1 to 1, or int16") from None
    if values.ndim != 1:
        raise InputError(f"{label} has the shape {values.shape}; give one channel of samples")
    if values.dtype.kind == "f":
        _require_levels(values, label)
        return values.astype("float32")
    if str(values.dtype) not in ("int16", "int32"):  # other types have no fixed range
        raise InputError(
            f"{label} is an array of {values.dtype}; give floats from -1 to 1, or int16"
        )
    return (values / 2.0 ** (8 * values.itemsize - 1)).astype("float32")


def _resample(samples: NDArray[np.float32], source_rate: int, rate: int) -> NDArray[np.float32]:
    from scipy.signal import resample_poly  # imported late: slow to import

    common = gcd(source_rate, rate)
    return resample_poly(samples, rate // common, source_rate // common).astype("float32")
