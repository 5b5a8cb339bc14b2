"""Sounds as callers give them, to one channel of samples at the rate that a model hears."""

from __future__ import annotations

import io
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.errors import InputError, one_line, shown
from foretoken.media.pictures import decoded, is_data_url

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LEAST_RATE, MOST_RATE = 1000, 768_000  # Hz
BLOCK = 2**18  # samples that are read at a time
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
        InputError: It is none of these, empty, or cannot be read; soundfile is missing.

    Examples:
        >>> import numpy
        >>> sound(numpy.zeros(8000), 16000, "audio 0").shape
        (8000,)
    """
    import numpy as np  # late: the command line does without

    if hasattr(value, "__array__"):
        samples, own = _floats(np.asarray(value), place), rate
        if most is not None and len(samples) > most * rate:
            raise _too_long(place, len(samples) / rate, most)
    else:
        samples, own = _read(value, place, most)
    if not len(samples):
        raise InputError(f"{place} holds no samples; give a sound")
    if not np.isfinite(samples).all():
        raise InputError(f"{place} holds samples that are not finite; give a sound")
    return samples if own == rate else _resampled(samples, own, rate)


def _read(value: Any, place: str, most: float | None) -> tuple[NDArray[np.float32], int]:
    """One channel of samples, and their rate."""
    import numpy as np

    try:
        import soundfile  # late: an extra
    except ImportError:
        raise InputError(f"{place} needs soundfile; pip install 'foretoken[media]'") from None
    if is_data_url(value):
        value = decoded(value, place)
    if isinstance(value, bytes):
        value = io.BytesIO(value)
    elif not isinstance(value, str | Path) or "://" in str(value):
        raise InputError(f"{place} is {shown(value)}; {GIVE}")
    try:
        with soundfile.SoundFile(value) as file:
            rate = file.samplerate
            _require_length(file, place, most)
            # channels are averaged block by block: all of them may be more than memory holds
            blocks = [np.mean(b, 1) for b in file.blocks(BLOCK, dtype="float32", always_2d=True)]
    except InputError:
        raise
    except Exception as error:  # files hold anything
        problem = "it is no sound that is read here, or damaged"
        if isinstance(value, str | Path) and not Path(value).is_file():
            problem = f"there is no file {value}"
        elif "Format not recognised" not in str(error):
            problem = one_line(error)
        raise InputError(f"{place} cannot be read: {problem}; {GIVE}") from None
    return np.concatenate(blocks) if blocks else np.zeros(0, np.float32), rate


def _require_length(file: Any, place: str, most: float | None) -> None:
    """InputError for a rate that no sound has, and for a sound that is too long."""
    rate = file.samplerate
    if not LEAST_RATE <= rate <= MOST_RATE:
        problem = f"{place} has {rate} samples a second"
        raise InputError(f"{problem}; give {LEAST_RATE} to {MOST_RATE}")
    if most is not None and file.frames > most * rate:
        raise _too_long(place, file.frames / rate, most)


def _too_long(place: str, seconds: float, most: float) -> InputError:
    return InputError(f"{place} lasts {seconds:.0f} s, at most {most:g} go; cut it")


def _floats(values: NDArray[Any], place: str) -> NDArray[np.float32]:
    """Samples from -1 to 1; InputError for what is no channel of samples."""
    if values.ndim != 1:
        raise InputError(f"{place} has the shape {values.shape}; give one channel of samples")
    if values.dtype.kind == "f":
        return values.astype("float32")
    if str(values.dtype) not in ("int16", "int32"):  # nobody knows the range of others
        raise InputError(f"{place} is an array of {values.dtype}; give floats, -1 to 1, or int16")
    return (values / 2.0 ** (8 * values.itemsize - 1)).astype("float32")


def _resampled(samples: NDArray[np.float32], own: int, rate: int) -> NDArray[np.float32]:
    from scipy.signal import resample_poly  # late: takes a while

    common = gcd(own, rate)
    return resample_poly(samples, rate // common, own // common).astype("float32")
