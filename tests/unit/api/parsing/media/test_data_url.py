"""Data URLs and bare base64 are decoded exactly, within the limit, or refused with their part."""

import base64
import tracemalloc

import pytest

from vlm_server.api.parsing.media import data_url
from vlm_server.api.parsing.media.external import MediaUrl
from vlm_server.errors import InvalidImage, PayloadTooLarge

DATA = bytes(range(256)) * 5
BASE64 = base64.b64encode(DATA).decode()
PARAM = "messages[2].content[1]"


def decode(url: str, max_bytes: int = 1 << 20) -> bytes:
    return data_url.decode(MediaUrl(url, PARAM, "image", max_bytes))


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{BASE64}",
        f"DATA:IMAGE/PNG;BASE64,{BASE64}",
        f"data:;base64,{BASE64}",
        f"data:image/png;charset=utf-8;base64,{BASE64}",
        f"data:image/png;name=a.png;charset=utf-8; base64,{BASE64}",
        f"data:application/pdf;base64,{BASE64}",
        "data:image/png;base64,\n" + base64.encodebytes(DATA).decode(),
        "data:image/png;base64," + "\r\n\t\f ".join(BASE64),
    ],
    ids=["plain", "upper", "untyped", "charset", "name", "lying", "newlines", "spaces"],
)
def test_valid_data_urls_are_decoded(url: str) -> None:
    assert decode(url) == DATA


def decode_bare(base64: str, max_bytes: int = 1 << 20) -> bytes:
    return data_url.decode_base64(MediaUrl(base64, PARAM, "image", max_bytes))


def test_bare_base64_is_decoded_within_limit() -> None:
    assert decode_bare(BASE64) == DATA
    with pytest.raises(PayloadTooLarge):
        decode_bare(BASE64, len(DATA) - 1)


def test_text_that_is_no_bare_base64_is_refused() -> None:
    for wrong in ("", "a", "@@@@", f"data:image/png;base64,{BASE64}"):
        with pytest.raises(InvalidImage) as refused:
            decode_bare(wrong)
        assert refused.value.param == PARAM
    assert "alone" in refused.value.message


def test_path_or_url_in_place_of_base64_is_refused_without_echo() -> None:
    for place in ("/home/me/passwd.png", "http://passwd.org/x.png", "file:///passwd", "a.png"):
        with pytest.raises(InvalidImage, match="base64 of the image, not a ") as refused:
            decode_bare(place)
        assert "passwd" not in refused.value.message


@pytest.mark.parametrize("length", range(8))
def test_every_base64_padding_is_decoded(length: int) -> None:
    data = bytes(range(1, length + 2))
    assert decode("data:image/png;base64," + base64.b64encode(data).decode()) == data


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "is empty"),
        ("https://example.com/secret.png", "base64 data URL"),
        ("file:///etc/passwd", "base64 data URL"),
        ("/etc/passwd", "base64 data URL"),
        ("/home/me/passwd.png", "not a path"),
        ("C:\\me\\passwd.png", "not a path"),
        ("./passwd.jpeg", "not a path"),
        ("passwd.webp", "not a path"),
        ("http://example.com/secret.png", "not a URL of the scheme `http:`"),
        ("blob:https://example.com/x", "not a URL of the scheme `blob:`"),
        (BASE64, "base64 data URL"),
        ("data:image/png;base64", "no comma"),
        ("data:image/png;" + "x" * 10_000 + ";base64," + BASE64, "no comma"),
        ("data:image/png," + BASE64, "';base64'"),
        ("data:base64," + BASE64, "';base64'"),
        ("data:image/png;base64;charset=utf-8," + BASE64, "';base64'"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png;base64, \n", "empty"),
        (BASE64 * 9, "write 'data:image/...;base64,' before"),
        (f"data:image/png;base64,data:image/png;base64,{BASE64}", "twice"),
        (f"data:image/png;base64,b'{BASE64}'", "Python's bytes"),
        (f"b'{BASE64}'", "Python's bytes"),
        ("data:image/png;base64,QUJ", "padded"),
        ("data:image/png;base64,QUJD=", "padded"),
        ("data:image/png;base64,Q===", "padded"),
        ("data:image/png;base64,====", "padded"),
        ("data:image/png;base64,QUI=QUJD", "padded"),
        ("data:image/png;base64,QU=D", "padded"),
        ("data:image/png;base64,QUJ!", "not base64"),
        ("data:image/png;base64,QUJ\u00e9", "not base64"),
        ("data:image/png;base64,QUJ\ud800", "not base64"),
        ("data:image/png;base64,QUI%3DAA", "percent"),
        ("data:image/png;base64,QUI%3D", "percent"),
        ("data:image/png;base64,_-_-", "URL-safe"),
    ],
)
def test_bad_data_urls_are_refused_with_their_part(url: str, reason: str) -> None:
    with pytest.raises(InvalidImage, match=reason) as caught:
        decode(url)
    assert caught.value.param == PARAM
    assert "passwd" not in caught.value.message
    assert "example" not in caught.value.message


def test_bytes_after_base64_padding_are_refused() -> None:
    with pytest.raises(InvalidImage, match="padded"):
        decode("data:image/png;base64,QQ==QUJD")


@pytest.mark.parametrize("size", [10, 11, 12])
def test_image_limit_counts_decoded_bytes_exactly(size: int) -> None:
    url = "data:image/png;base64," + base64.b64encode(bytes(size)).decode()
    assert decode(url, max_bytes=size) == bytes(size)
    with pytest.raises(PayloadTooLarge) as caught:
        decode(url, max_bytes=size - 1)
    assert caught.value.param == PARAM


def test_image_limit_is_checked_before_decoding() -> None:
    url = "data:image/png;base64," + "A" * (8 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(PayloadTooLarge):
            decode(url, max_bytes=1000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(url) + (1 << 20)  # copies without white space; never the bytes as well
