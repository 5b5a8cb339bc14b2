"""Pictures of every kind are read upright, in RGB, or refused in one line."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from foretoken.errors import InputError
from foretoken.media import pictures
from foretoken.media.pictures import picture

RED = (255, 0, 0)


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
        read = picture(value, "image 0")
        assert read.mode == "RGB" and read.size == (5, 3) and read.getpixel((4, 2)) == RED


@pytest.mark.parametrize("mode", ["L", "CMYK", "1", "P", "YCbCr", "LAB", "HSV", "F"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    white = Image.new("RGB", (2, 2), "white").convert(mode if mode not in ("LAB",) else "RGB")
    assert picture(white, "image 0").mode == "RGB"
    assert picture(Image.new("L", (2, 2), 77), "image 0").getpixel((0, 0)) == (77, 77, 77)


def test_grey_of_sixteen_bits_keeps_its_highest() -> None:
    deep = Image.fromarray(np.full((2, 2), 40_000, np.uint16))
    assert picture(url(saved(deep)), "image 0").getpixel((0, 0)) == (156, 156, 156)


def test_what_is_transparent_is_white() -> None:
    clear = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    clear.putpixel((1, 0), (0, 0, 255, 255))
    read = picture(url(saved(clear)), "image 0")
    assert [read.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (0, 0, 255)]
    palette = Image.new("P", (1, 1), 0)
    palette.putpalette([255, 0, 0])
    assert picture(url(saved(palette, transparency=0)), "image 0").getpixel((0, 0)) == (255,) * 3


def test_a_picture_is_turned_as_its_camera_says() -> None:
    image = Image.new("RGB", (4, 2), RED)
    exif = Image.Exif()
    exif[0x0112] = 6  # held upright
    assert picture(url(saved(image, "JPEG", exif=exif)), "image 0").size == (2, 4)


def test_an_animation_is_its_first_image() -> None:
    images = [Image.new("RGB", (2, 2), color) for color in ("red", "blue")]
    moving = saved(images[0], "GIF", save_all=True, append_images=images[1:])
    assert picture(url(moving), "image 0").getpixel((0, 0)) == RED


def test_one_pixel_and_many() -> None:
    assert picture(Image.new("RGB", (1, 1)), "image 0").size == (1, 1)
    assert picture(url(saved(Image.new("1", (8000, 8000)))), "image 0").size == (8000, 8000)


def test_more_pixels_than_fit_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MOST_PIXELS", 99)
    with pytest.raises(InputError, match="image 3 has 10 x 10 pixels, more than 99; make it"):
        picture(url(saved(Image.new("L", (10, 10)))), "image 3")
    bomb = saved(Image.new("1", (20_000, 20_000)))  # 50 kB
    with pytest.raises(InputError, match="make it smaller"):
        picture(url(bomb), "image 3")


WHOLE = saved(Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64), np.uint8)))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (url(WHOLE[: len(WHOLE) // 2]), "image 0 cannot be read"),
        (url(b"<svg/>"), "image 0 is no picture"),
        ("nowhere.png", "image 0 is no picture"),
        ("data:image/png,abc", "give a data URL in base64"),
        ("data:image/png;base64,???", "not in base64"),
        ("https://example.com/cat.png", "give a file, a data URL"),
        (7, "give a file, a data URL"),
        (np.zeros((2, 2, 7), np.uint8), "image 0 is no picture"),
        (Image.new("RGB", (0, 3)), "image 0 has 0 x 3 pixels; give a picture"),
    ],
)
def test_what_is_no_picture(value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        picture(value, "image 0")
    assert "\n" not in str(error.value) and len(str(error.value)) < 300
