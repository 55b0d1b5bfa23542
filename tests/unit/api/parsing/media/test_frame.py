"""Frames: their facts, and how much of them changed."""

from __future__ import annotations

import hashlib

import pytest
from PIL import Image, ImageDraw

from tests.support.image_files import encoded, image_file, png
from vlm_server.api.parsing.media import frame
from vlm_server.errors import InvalidImage

PIXELS = 1_000_000


def picture(colour: str = "white", box: tuple[int, int, int, int] | None = None) -> Image.Image:
    image = Image.new("RGB", (640, 480), "white")
    if box is not None:
        ImageDraw.Draw(image).rectangle(box, colour)
    return image


def thumbnail(image: Image.Image, file_format: str = "JPEG") -> bytes:
    return frame.read(encoded(image, file_format), PIXELS).thumbnail


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_facts_have_header_hash_and_thumbnail(file_format: str) -> None:
    data = encoded(picture(), file_format)
    facts = frame.read(data, PIXELS)
    assert (facts.format, facts.width, facts.height) == (file_format, 640, 480)
    assert facts.content_hash == hashlib.sha256(data).hexdigest()
    assert len(facts.thumbnail) == frame.SIDE**2 * 3
    assert min(facts.thumbnail) > 250


def test_change_is_share_of_changed_area() -> None:
    before = thumbnail(picture(), "PNG")
    after = thumbnail(picture("black", (0, 0, 319, 479)), "PNG")
    assert frame.changed_share(before, after, 16) == 0.5
    assert frame.changed_share(before, before, 0) == 0.0
    faint = thumbnail(picture("#f8f8f8", (0, 0, 639, 479)), "PNG")
    assert frame.changed_share(before, faint, 7) == 0.0
    assert frame.changed_share(before, faint, 6) == 1.0


def test_colours_of_equal_brightness_differ() -> None:
    red, green = (thumbnail(picture(c, (0, 0, 639, 479))) for c in ("#d00000", "#006a00"))
    assert frame.changed_share(red, green, 16) == 1.0


def test_small_thing_is_seen_in_large_frame() -> None:
    """One of 20 by 20 pixels in 640 by 480 is a thousandth of them, and touches more."""
    change = frame.changed_share(
        thumbnail(picture()), thumbnail(picture("black", (301, 201, 321, 221))), 16
    )
    assert 0.001 < change < 0.005


HOSTILE = {
    "empty": b"",
    "text": b"hello" * 100,
    "cut": encoded(picture(), "PNG")[:200],
    "cut JPEG": encoded(picture(), "JPEG")[:700],
    "bomb": png(50_000, 50_000),
    "HEIC": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_frames_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidImage) as raised:
        frame.read(data, PIXELS)
    assert len(raised.value.message) < 200


def test_palette_and_transparency_have_thumbnails() -> None:
    for mode in ("P", "L", "RGBA", "LA", "1"):
        assert len(frame.read(image_file("PNG", mode=mode), PIXELS).thumbnail) == frame.SIDE**2 * 3
