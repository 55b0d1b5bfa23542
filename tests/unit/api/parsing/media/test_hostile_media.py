"""Damaged media and arbitrary URLs are read, or refused by our own errors."""

from __future__ import annotations

import base64
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import video_files
from tests.support.image_files import animated, data_url, image_file
from tests.support.whole_run import examples
from vlm_server.api.parsing.media import data_url as urls
from vlm_server.api.parsing.media import image_bounds, image_header, video_header
from vlm_server.api.parsing.media.external import MediaUrl
from vlm_server.api.parsing.media.parse import parse_image
from vlm_server.errors import InvalidImage, InvalidVideo, PayloadTooLarge

IMAGES = [
    *(image_file(name, (9, 7)) for name in ("PNG", "JPEG", "WEBP", "GIF")),
    *(animated(name) for name in ("PNG", "WEBP", "GIF")),
]
CLIP = video_files.encode(video_files.noise(1, 3))
HEAD = st.sampled_from(
    ["data:image/png;base64,", "DATA:;BASE64,", "data:,", "data:;charset=x,", ""]
)


@settings(derandomize=True)
@given(HEAD, st.text(max_size=60) | st.text("AQg+/=\n -_", max_size=60), st.integers(0, 60))
def test_arbitrary_urls_are_decoded_or_refused(head: str, payload: str, max_bytes: int) -> None:
    with contextlib.suppress(InvalidImage, PayloadTooLarge):
        assert len(urls.decode(MediaUrl(head + payload, "p", "image", max_bytes))) <= max_bytes


@settings(derandomize=True)
@given(st.binary(min_size=1, max_size=80))
def test_base64_round_trip_returns_bytes(data: bytes) -> None:
    assert urls.decode(MediaUrl(data_url(data), "p", "image", 80)) == data
    if len(data) > 1:
        with pytest.raises(PayloadTooLarge):
            urls.decode(MediaUrl(data_url(data), "p", "image", len(data) - 1))


@settings(max_examples=examples(200), derandomize=True)
@given(st.data())
def test_damaged_image_header_is_read_or_refused(data: st.DataObject) -> None:
    image = bytearray(data.draw(st.sampled_from(IMAGES)))
    places = st.integers(0, len(image) - 1)
    for place in data.draw(st.lists(places, max_size=6)):
        image[place] = data.draw(st.integers(0, 255))
    del image[data.draw(st.integers(1, len(image))) :]
    with contextlib.suppress(image_bounds.TooMuch):
        image_bounds.check(bytes(image))
    with contextlib.suppress(InvalidImage):
        assert image_header.read(bytes(image), "p", 1 << 30).width > 0


@settings(derandomize=True)
@given(st.data())
def test_damaged_video_header_is_read_or_refused(data: st.DataObject) -> None:
    clip = bytearray(CLIP)
    places = st.integers(0, 400)
    for place in data.draw(st.lists(places, max_size=6)):
        clip[place] = data.draw(st.integers(0, 255))
    with contextlib.suppress(InvalidVideo):
        video_header.read(bytes(clip), "p")


def test_white_space_in_non_ascii_url_is_refused_at_once() -> None:
    with pytest.raises(InvalidImage, match="not base64"):
        urls.decode(MediaUrl("data:;base64," + "🦊\n" * 1_000_000, "p", "image", 1 << 30))


def test_image_hash_ignores_base64_line_breaks() -> None:
    from vlm_server.settings import Limits

    lines = base64.encodebytes(IMAGES[0]).decode()
    image = parse_image(f"data:image/png;base64,{lines}", "p", Limits())
    assert image == parse_image(data_url(IMAGES[0]), "p", Limits())
