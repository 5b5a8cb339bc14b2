"""Pictures of every kind are read upright, in RGB, or refused in one line."""

from __future__ import annotations

import base64
import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from foretoken.errors import InputError
from foretoken.media import images
from foretoken.media.images import load_image

RED = (255, 0, 0)
PILS_OWN: Any = Image.MAX_IMAGE_PIXELS  # it warns above, and raises at twice as many


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def test_a_file_a_url_an_image_and_an_array(tmp_path: Path) -> None:
    image = Image.new("RGB", (5, 3), RED)
    file = tmp_path / "red.png"
    file.write_bytes(saved(image))
    for value in (str(file), file, url(saved(image)), image, np.asarray(image)):
        read = load_image(value, "image 0")
        assert read.mode == "RGB" and read.size == (5, 3) and read.getpixel((4, 2)) == RED


def at(value: Any, *places: tuple[int, int]) -> list[Any]:
    """The colors of a picture at these places, (0, 0) unless there are some."""
    read = load_image(value, "image 0")
    assert read.mode == "RGB"
    return [read.getpixel(place) for place in places or ((0, 0),)]


def test_every_mode_becomes_rgb() -> None:
    """Grey of sixteen bits by its highest; what is transparent is white."""
    for mode in ("L", "LA", "CMYK", "1", "P", "RGBA", "RGBX", "YCbCr", "HSV"):
        assert at(Image.new("RGB", (2, 2), "white").convert(mode)) == [(255,) * 3], mode
    assert at(Image.new("L", (2, 2), 77)) == [(77, 77, 77)]
    deep = Image.fromarray(np.array([[40_000, 156]], np.uint16))
    assert at(url(saved(deep)), (0, 0)) == [(156,) * 3]
    both = at(saved(deep, transparency=156), (0, 0), (1, 0))
    assert both == [(156,) * 3, (255,) * 3]
    clear = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    clear.putpixel((1, 0), (0, 0, 255, 255))
    assert at(url(saved(clear)), (0, 0), (1, 0)) == [(255, 255, 255), (0, 0, 255)]
    palette = Image.new("P", (1, 1), 0)
    palette.putpalette([255, 0, 0])
    assert at(url(saved(palette, transparency=0))) == [(255,) * 3]


def tiff(values: Any, **tags: int) -> bytes:
    """A TIFF file of one number, or several bands, for each of its pixels `[H, W, bands]`."""
    height, width, bands = values.shape
    sizes, signs = [tags.get("bits", 8 * values.itemsize)] * bands, [tags.get("sign", 1)] * bands
    entries = {256: [tags.get("width", width)], 257: [height], 258: sizes, 259: [1]}
    entries |= {262: [tags.get("photometric", 1)], 273: [0], 277: [bands], 278: [height]}
    entries |= {279: [values.nbytes]} | ({338: [tags.get("extra", 0)]} if bands == 2 else {})
    entries |= {339: signs}
    behind = 8 + 2 + 12 * len(entries) + 4
    entries[273] = [behind + 8 * sum(len(x) > 2 for x in entries.values())]
    table = long = b""
    for tag, numbers in entries.items():
        few = len(numbers) <= 2
        padded = [*numbers, *[0] * ((2 if few else 4) - len(numbers))]
        table += struct.pack("<HHI", tag, 3, len(numbers))
        table += struct.pack("<2H", *padded) if few else struct.pack("<I", behind + len(long))
        long += b"" if few else struct.pack("<4H", *padded)
    head = b"II" + struct.pack("<HIH", 42, 8, len(entries))
    return head + table + bytes(4) + long + values.tobytes()


TWELVE = np.frombuffer(b"\x80\x08\x00" * 8, "u1").reshape(4, 6, 1)  # 0x800, in 12 bits each


def full(value: float, dtype: str, bands: int = 1) -> Any:
    return np.full((4, 4, bands), value, dtype)


def test_grey_has_the_range_of_its_file() -> None:
    """Numbers without a known range are refused: they were all black, or all white."""
    for data, grey in (
        (tiff(full(40_000, "<u2")), 156),
        (tiff(full(40_000, "<u2"), photometric=0), 99),  # 0 is white
        (tiff(TWELVE, bits=12, width=4), 128),
        (tiff(full(100, "u1", 2), extra=1), 255),  # times alpha already: 100 of 100
        (tiff(full(100, "u1", 2), extra=2), 194),
        (b"P5 2 2 1000\n" + np.full(4, 500, ">u2").tobytes(), 128),
        (b"P5 2 2 65535\n" + np.full(4, 100, ">u2").tobytes(), 0),  # however dark all of it is
    ):
        assert at(data) == [(grey,) * 3]
    for value, kind in (
        (tiff(full(0.5, "<f4"), sign=3), "floats"),
        (b"Pf\n2 2\n-1.0\n" + np.full(4, 0.5, "<f4").tobytes(), "floats"),
        (Image.new("F", (2, 2), 1), "floats"),
        (tiff(full(-5, "<i2"), sign=2), "signed or 32-bit integers"),
        (tiff(full(-5, "i1"), sign=2), "signed or 32-bit integers"),
        (tiff(full(2**31, "<u4")), "signed or 32-bit integers"),
        (Image.new("I", (2, 2), 200), "signed or 32-bit integers"),
        (tiff(full(100, "u1", 3), photometric=8), "Lab colors"),
    ):
        with pytest.raises(InputError, match=f"image 0 holds {kind}, .*; save the"):
            load_image(value, "image 0")


def test_a_picture_is_turned_as_its_camera_says_and_an_animation_is_its_first_image() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # held upright
    turned = url(saved(Image.new("RGB", (4, 2), RED), "JPEG", exif=exif))
    assert load_image(turned, "image 0").size == (2, 4)
    images = [Image.new("RGB", (2, 2), color) for color in ("red", "blue")]
    moving = saved(images[0], "GIF", save_all=True, append_images=images[1:])
    assert at(url(moving)) == [RED]
    assert load_image(Image.new("RGB", (1, 1)), "image 0").size == (1, 1)
    assert load_image(url(saved(Image.new("1", (8000, 8000)))), "image 0").size == (8000, 8000)


def test_more_pixels_than_fit_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PIXELS", 99)
    with pytest.raises(InputError, match="image 3 has 10 x 10 pixels, more than 99"):
        load_image(url(saved(Image.new("L", (10, 10)))), "image 3")
    bomb = saved(Image.new("1", (20_000, 20_000)))  # 50 kB, too large for PIL itself
    limits = [(None, "99"), (25_000_000, "25,000,000"), (10**9, f"{2 * PILS_OWN:,}")]
    for most, limit in limits:
        with pytest.raises(InputError, match=f"image 3 has more than {limit} pixels; give"):
            load_image(url(bomb), "image 3", most)


WHOLE = saved(Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64), np.uint8)))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (url(WHOLE[: len(WHOLE) // 2]), "image 0 cannot be read"),
        (url(b"<svg/>"), "image 0 is not a"),
        ("nowhere.png", "image 0 is not a"),
        ("data:image/png,abc", "give a data URL in base64"),
        ("data:image/png;base64,???", "not valid base64"),
        ("https://example.com/cat.png", "give a file, a data URL"),
        (7, "give a file, a data URL"),
        (np.zeros((2, 2, 7), np.uint8), "image 0 is not a"),
        (Image.new("RGB", (0, 3)), "image 0 has 0 x 3 pixels; give a larger"),
    ],
)
def test_what_is_no_picture(value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        load_image(value, "image 0")
    assert "\n" not in str(error.value) and len(str(error.value)) < 300
