"""Loads images from files, bytes, data URLs, PIL images and arrays as upright RGB images of PIL."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foretoken.errors import InputError, format_value, to_one_line
from foretoken.media.data_urls import decode_data_url, is_data_url

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 100_000_000  # 10,000 x 10,000: 300 MB in memory
# Other formats may run programs (EPS) or are rarely used for images
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "PPM")
# PIL's modes with known black and white points, unlike F (floats), I (32-bit integers) and LAB
IMAGE_MODES = {"1", "L", "LA", "La", "P", "PA"}
IMAGE_MODES |= {"RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV"}
GREY16_MODES = {"I;16", "I;16B", "I;16L", "I;16N"}
# TIFF tags: bits per sample; polarity (0: 0 is white); sample format (1: unsigned)
TIFF_BITS_TAG, TIFF_POLARITY_TAG, TIFF_SIGN_TAG = 258, 262, 339
IMAGE_REMEDY = "give a file, a data URL, a PIL image or an array [height, width, 3]"


def load_image(value: Any, label: str, max_pixels: int | None = None) -> Image:
    """Return an upright RGB image for a model's processor. Transparent parts become white; an
    animation gives its first frame.

    Args:
        value: A file's path, a file's bytes, a data URL, a PIL image or an array of bytes `[H, W]`
            or `[H, W, C]`.
        label: Name of the value in error messages.
        max_pixels: Maximum number of pixels; None is 100 million.

    Raises:
        InputError: `value` is none of these, cannot be decoded, is too large, or has pixel values
            without a known range; or Pillow is missing.

    Examples:
        >>> import numpy
        >>> load_image(numpy.zeros((2, 3), dtype="uint8"), "image 0").size
        (3, 2)
    """
    Image, ImageOps, _ = _import_pillow(label)
    max_pixels = MAX_PIXELS if max_pixels is None else max_pixels
    opened = value if isinstance(value, Image.Image) else _open_image(value, label, max_pixels)
    width, height = opened.size
    if not width * height:
        raise InputError(f"{label} has {width} x {height} pixels; give a larger image")
    if width * height > max_pixels:
        raise InputError(
            f"{label} has {width} x {height} pixels, more than {max_pixels:,}; give a smaller image"
        )
    _require_range(opened, label)
    try:
        return _to_rgb(ImageOps.exif_transpose(opened), _get_tiff_tags(opened))
    except Image.DecompressionBombError:  # raised for a tile or another frame
        raise _make_size_error(label, max_pixels) from None
    except Exception as error:  # a truncated or invalid file
        raise InputError(
            f"{label} cannot be read: {to_one_line(error)}; give a complete image"
        ) from None


def _import_pillow(label: str):  # not annotated: the types are Pillow's
    """Import Pillow at the time of use: it is an extra. Raises InputError if it is missing."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise InputError(f"{label} needs Pillow; pip install 'foretoken[media]'") from None
    return Image, ImageOps, UnidentifiedImageError


def _open_image(value: Any, label: str, max_pixels: int) -> Image:
    """Return the image in a file, a data URL or an array; its pixels are not decoded yet."""
    Image, _, UnidentifiedImageError = _import_pillow(label)
    array = getattr(value, "__array__", None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the size is checked
            if is_data_url(value):
                return Image.open(io.BytesIO(decode_data_url(value, label)), formats=IMAGE_FORMATS)
            if isinstance(value, bytes):
                return Image.open(io.BytesIO(value), formats=IMAGE_FORMATS)
            if isinstance(value, str | Path) and "://" not in str(value):
                return Image.open(value, formats=IMAGE_FORMATS)
            if array is not None:
                return Image.fromarray(_require_bytes(array(), label))
    except InputError:
        raise
    except UnidentifiedImageError:
        raise InputError(
            f"{label} is not an image in {', '.join(IMAGE_FORMATS[:-1])} or {IMAGE_FORMATS[-1]}; "
            f"{IMAGE_REMEDY}"
        ) from None
    except Image.DecompressionBombError:
        raise _make_size_error(label, max_pixels) from None
    except Exception as error:  # a damaged file raises any type
        problem = f"{label} is not a valid image: {to_one_line(error)}"
        raise InputError(f"{problem}; {IMAGE_REMEDY}") from None
    raise InputError(f"{label} is {format_value(value)}; {IMAGE_REMEDY}")


def _make_size_error(label: str, max_pixels: int) -> InputError:
    """Return the error for an image that PIL refused because of its size. The message states the
    smaller of the two limits, `max_pixels` and PIL's own."""
    Image, *_ = _import_pillow(label)
    max_pixels = min(max_pixels, 2 * (Image.MAX_IMAGE_PIXELS or max_pixels))
    return InputError(f"{label} has more than {max_pixels:,} pixels; give a smaller image")


def _require_bytes(values: Any, label: str) -> Any:
    """Return `values` unchanged if it is an array of bytes. Raises InputError for other dtypes,
    which have no fixed range."""
    if str(values.dtype) == "uint8":
        return values
    raise InputError(f"{label} is an array of {values.dtype}; give bytes (uint8), 0 to 255")


def _get_tiff_tags(image: Image) -> Mapping[int, Any]:
    return getattr(image, "tag_v2", {})


def _require_range(image: Image, label: str) -> None:
    """Raise InputError for pixel values whose black and white points are unknown."""
    scaled = image.mode == "I" and image.format == "PPM"  # PIL scales it to 16 bits
    unsigned = {*_get_tiff_tags(image).get(TIFF_SIGN_TAG, (1,))} == {1}
    if not (unsigned and (scaled or image.mode in IMAGE_MODES | GREY16_MODES)):
        kind = {"F": "floats", "LAB": "Lab colors"}.get(image.mode, "signed or 32-bit integers")
        problem = f"{label} holds {kind}, whose black and white points are unknown"
        raise InputError(f"{problem}; save the image as RGB of 8 bits")


def _to_rgb(image: Image, tags: Mapping[int, Any]) -> Image:
    """Return the image in RGB, on a white background."""
    Image, *_ = _import_pillow("an image")
    if image.mode == "I" or image.mode in GREY16_MODES:
        image = _to_8_bits(image, tags)
    elif image.mode in ("La", "RGBa"):  # multiplied by alpha
        image = image.convert(image.mode.upper())
    if "A" not in image.mode and "transparency" not in image.info:
        return image.convert("RGB")
    layered = image.convert("RGBA")
    white = Image.new("RGBA", layered.size, "white")
    return Image.alpha_composite(white, layered).convert("RGB")


def _to_8_bits(image: Image, tags: Mapping[int, Any]) -> Image:
    """Convert a grey image of 16 bits, or 12 in TIFF, to 8 bits with alpha."""
    Image, *_ = _import_pillow("an image")
    values = np.asarray(image)
    bits = 12 if tags.get(TIFF_BITS_TAG) == (12,) else 16
    grey = (values >> (bits - 8)).astype(np.uint8)
    grey = ~grey if tags.get(TIFF_POLARITY_TAG) == 0 else grey
    alpha = np.where(values == image.info.get("transparency"), 0, 255).astype(np.uint8)
    return Image.fromarray(np.stack([grey, alpha], -1))
