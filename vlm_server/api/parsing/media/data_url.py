"""Decoding of base64 data URLs (RFC 2397, RFC 4648).

The scheme and `base64` are case-insensitive, parameters such as `charset` may precede `base64`,
and whitespace inside the base64 is skipped. The MIME type is ignored: the format is read from
the bytes. The URL-safe alphabet, percent escapes and missing padding are refused.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pybase64

from vlm_server.errors import InvalidImage, InvalidRequest, InvalidVideo, PayloadTooLarge

MAX_HEADER_CHARS = 1024
_BYTES_LITERAL = re.compile("b['\"]")
_IS_BYTES_LITERAL = (
    "The base64 is written as Python's bytes (b'...'): decode it to text first, with `.decode()`."
)
_FRAME_LIST = re.compile(r"data:\s*video/jpe?g\s*[;,]", re.IGNORECASE)
"""vLLM's form of a video's frames: JPEG images, separated by commas."""
_IS_FRAME_LIST = (
    "A list of frames (`data:video/jpeg`) is no video: send the frames as images, in their order "
    "and with a text before each that says its time, or the video itself as MP4, WebM or GIF."
)
_BASE64 = re.compile(r"[A-Za-z0-9+/=\s]{40,}")
_ALPHABET = re.compile(r"[A-Za-z0-9+/=]*")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{1,9}):")
_PATH = re.compile(r"(?:~|\.{0,2}/|[A-Za-z]:[\\/]).*\.[A-Za-z0-9]{2,5}|[^/\\:]+\.[a-zA-Z]{3,4}")
_MAX_PATH_CHARS = 4096
_PROBED_CHARS = 256
_WHITE_SPACE = " \t\r\n\f"


@dataclass(frozen=True, slots=True)
class MediaKind:
    """The kind of medium in a URL: its noun in messages, and its error."""

    noun: str
    error: type[InvalidRequest]


IMAGE = MediaKind("image", InvalidImage)
VIDEO = MediaKind("video", InvalidVideo)


def decode(url: str, param: str, max_bytes: int, kind: MediaKind) -> bytes:
    """The bytes in `url`.

    `param` names the content part in errors. Raises `kind.error` if `url` is not a base64 data URL,
    and PayloadTooLarge, before decoding, if it holds more than `max_bytes`.
    """
    with _errors_of(param, max_bytes, kind):
        return _decode_base64(_payload(url, kind), max_bytes)


def decode_base64(data: str, param: str, max_bytes: int, kind: MediaKind) -> bytes:
    """The bytes in `data`, which is the base64 of a data URL without what comes before it.

    Raises as `decode` does.
    """
    with _errors_of(param, max_bytes, kind):
        if data[:5].lower() == "data:":
            raise _NotDecodable("This must be the base64 alone, without the 'data:...,' before it.")
        if place := _place(data):
            raise _NotDecodable(f"This must be the base64 of the {kind.noun}, not {place}.")
        return _decode_base64(data, max_bytes)


@contextmanager
def _errors_of(param: str, max_bytes: int, kind: MediaKind) -> Iterator[None]:
    try:
        yield
    except _NotDecodable as error:
        raise kind.error(str(error), param) from None
    except _TooLarge:
        message = (
            f"The {kind.noun} is larger than {max_bytes} bytes (limits.max_{kind.noun}_bytes)."
        )
        raise PayloadTooLarge(message, param) from None


class _NotDecodable(Exception):
    """The URL can't be decoded; the message says why."""


class _TooLarge(Exception):
    """The URL contains more bytes than allowed."""


def _payload(url: str, kind: MediaKind) -> str:
    if url[:5].lower() != "data:":
        raise _NotDecodable(_not_a_data_url(url, kind))
    if kind is VIDEO and _FRAME_LIST.match(url):
        raise _NotDecodable(_IS_FRAME_LIST)
    comma = url.find(",", 0, MAX_HEADER_CHARS)
    if comma < 0:
        raise _NotDecodable("The data URL has no comma before its data.")
    _, semicolon, last_parameter = url[5:comma].rpartition(";")
    if not semicolon or last_parameter.strip().lower() != "base64":
        raise _NotDecodable("The data URL must say ';base64' before its comma.")
    return url[comma + 1 :]


def _not_a_data_url(url: str, kind: MediaKind) -> str:
    if _BYTES_LITERAL.match(url):
        return _IS_BYTES_LITERAL
    if not url:
        return f"The {kind.noun}'s URL is empty."
    start = f"'data:{kind.noun}/...;base64,'"
    if _BASE64.fullmatch(url[:_PROBED_CHARS]):
        return f"The {kind.noun} must be a base64 data URL: write {start} before the base64."
    place = _place(url)
    what_it_is = f", not {place}" if place else ""
    return (
        f"The {kind.noun} must be a base64 data URL, which begins with {start}, or an https: or "
        f"file: URL that the settings urls.https_hosts or urls.file_roots allow{what_it_is}."
    )


def _place(text: str) -> str | None:
    """A description of `text` if it is a path or URL: base64 has neither colon nor full stop."""
    if len(text) > _MAX_PATH_CHARS:
        return None
    if _PATH.fullmatch(text):
        return "a path"
    scheme = _SCHEME.match(text)
    return f"a URL of the scheme `{scheme[1].lower()}:`" if scheme else None


def _decode_base64(payload: str, max_bytes: int) -> bytes:
    if payload[:5].lower() == "data:":
        raise _NotDecodable("The data URL holds another one: it has 'data:...;base64,' twice.")
    if _BYTES_LITERAL.match(payload):
        raise _NotDecodable(_IS_BYTES_LITERAL)
    if not payload.isascii():
        raise _wrong(payload)
    data = _without_white_space(payload)
    if not data:
        raise _NotDecodable("The data is empty.")
    padding = _padding(data)
    if padding is None:
        raise _wrong(data)
    if len(data) // 4 * 3 - padding > max_bytes:
        raise _TooLarge
    try:
        return pybase64.b64decode(data, validate=True)
    except binascii.Error:
        raise _wrong(data) from None


def _without_white_space(payload: str) -> str:
    """`payload` without white space. Searching first avoids a copy of most payloads."""
    if any(character in payload for character in _WHITE_SPACE):
        return payload.translate(dict.fromkeys(map(ord, _WHITE_SPACE)))
    return payload


def _padding(data: str) -> int | None:
    """The number of `=` at the end: 0 to 2. None if some are elsewhere, or too few."""
    first = data.find("=")
    padding = 0 if first < 0 else len(data) - first
    return None if len(data) % 4 or padding > 2 else padding


def _wrong(data: str) -> _NotDecodable:
    """The error that says why `data` is no base64."""
    if _ALPHABET.fullmatch(data):
        return _NotDecodable("The base64 data is truncated or wrongly padded.")
    if "%" in data:
        return _NotDecodable("The data has percent escapes, such as %2B for '+': undo them.")
    if "-" in data or "_" in data:
        return _NotDecodable("The URL-safe base64 alphabet is not supported; use '+' and '/'.")
    return _NotDecodable("The data contains characters that are not base64.")
