"""Pictures as callers give them, to PIL's: upright, in RGB, of a size that fits in memory."""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.errors import InputError, one_line, shown

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 100_000_000  # 10,000 x 10,000, in memory 300 MB
# Others run programs (EPS), or are seldom pictures of anything
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "PPM")
DATA = "data:"
GIVE = "give a file, a data URL, a PIL image or an array [height, width, 3]"


def picture(value: Any, place: str, most: int | None = None) -> Image:
    """Return a picture as a model's processor takes it: upright, in RGB, on white where it is
    transparent; of an animation the first image.

    Args:
        value: A file's path, its bytes, a data URL, a PIL image or an array of bytes `[H, W]` or
            `[H, W, C]`.
        place: Where it stands, for errors.
        most: Pixels at most; None is 100 million.

    Raises:
        InputError: It is none of these, too large, or cannot be read; Pillow is missing.

    Examples:
        >>> import numpy
        >>> picture(numpy.zeros((2, 3), dtype="uint8"), "image 0").size
        (3, 2)
    """
    try:
        from PIL import Image, ImageOps  # late: an extra
    except ImportError:
        raise InputError(f"{place} needs Pillow; pip install 'foretoken[media]'") from None
    opened = value if isinstance(value, Image.Image) else _opened(value, place)
    width, height = opened.size
    most = MOST_PIXELS if most is None else most
    if not width * height:
        raise InputError(f"{place} has {width} x {height} pixels; give a picture")
    if width * height > most:
        raise InputError(
            f"{place} has {width} x {height} pixels, more than {most:,}; make it smaller"
        )
    try:
        return _plain(ImageOps.exif_transpose(opened))
    except Exception as error:  # a file that is cut off, or breaks its format's rules
        raise InputError(
            f"{place} cannot be read: {one_line(error)}; give a whole picture"
        ) from None


def _opened(value: Any, place: str) -> Image:
    """The picture in a file, a data URL or an array; its pixels are not read yet."""
    from PIL import Image, UnidentifiedImageError

    array = getattr(value, "__array__", None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the size is checked
            if is_data_url(value):
                return Image.open(io.BytesIO(decoded(value, place)), formats=FORMATS)
            if isinstance(value, bytes):
                return Image.open(io.BytesIO(value), formats=FORMATS)
            if isinstance(value, str | Path) and "://" not in str(value):
                return Image.open(value, formats=FORMATS)
            if array is not None:
                return Image.fromarray(_bytes(array(), place))
    except InputError:
        raise
    except UnidentifiedImageError:
        raise InputError(
            f"{place} is no picture in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}; {GIVE}"
        ) from None
    except Image.DecompressionBombError:
        raise InputError(f"{place} has more than {MOST_PIXELS:,} pixels; make it smaller") from None
    except Exception as error:  # files hold anything
        raise InputError(f"{place} is no picture: {one_line(error)}; {GIVE}") from None
    raise InputError(f"{place} is {shown(value)}; {GIVE}")


def _bytes(values: Any, place: str) -> Any:
    """An array of bytes; InputError for others, whose range nobody knows."""
    if str(values.dtype) == "uint8":
        return values
    raise InputError(f"{place} is an array of {values.dtype}; give bytes (uint8), 0 to 255")


def is_data_url(value: Any) -> bool:
    """Tell whether a value is a URL that holds its file itself."""
    return isinstance(value, str) and value[: len(DATA)].lower() == DATA


def decoded(url: str, place: str) -> bytes:
    """Return the bytes in a data URL; InputError where they are not in base64."""
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InputError(f"{place} is {shown(url)}; give a data URL in base64")
    return from_base64(body, place)


def from_base64(text: str, place: str) -> bytes:
    """Return the bytes of a text; InputError where it is not in base64."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InputError(f"{place} is not in base64; encode it again") from None


def _plain(image: Image) -> Image:
    """The picture in RGB, on white."""
    from PIL import Image

    if image.mode.startswith(("I;16", "I")):  # 16 bits of grey
        wide = image.convert("I")
        narrow = image.mode == "I" and wide.getextrema()[1] <= 255  # pyright: ignore
        image = wide.point(lambda value: value / (1 if narrow else 256)).convert("L")
    if "A" not in image.mode and "transparency" not in image.info:
        return image.convert("RGB")
    layered = image.convert("RGBA")
    white = Image.new("RGBA", layered.size, "white")
    return Image.alpha_composite(white, layered).convert("RGB")
