"""Decodes base64 data URLs (RFC 2397, RFC 4648).

The scheme and `base64` are case-insensitive, parameters such as `charset` may precede `base64`,
and whitespace inside the base64 is skipped. The MIME type is ignored: the format is read from
the bytes. The URL-safe alphabet, percent escapes and missing padding are refused.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pybase64

from vlm_server.errors import InvalidImage, InvalidRequest, InvalidVideo, PayloadTooLarge

MAX_HEADER_CHARS = 1024
_WHITE_SPACE = " \t\r\n\f"


@dataclass(frozen=True, slots=True)
class MediaKind:
    """What a URL should contain, for messages, and the error for one that can't be decoded."""

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
        return _decode_base64(data, max_bytes)


@contextmanager
def _errors_of(param: str, max_bytes: int, kind: MediaKind) -> Iterator[None]:
    try:
        yield
    except _NotDecodable as error:
        raise kind.error(str(error), param) from None
    except _TooLarge:
        message = f"The {kind.noun} is larger than {max_bytes} bytes."
        raise PayloadTooLarge(message, param) from None


class _NotDecodable(Exception):
    """What is wrong with the URL."""


class _TooLarge(Exception):
    """The URL contains more bytes than allowed."""


def _payload(url: str, kind: MediaKind) -> str:
    if url[:5].lower() != "data:":
        raise _NotDecodable(
            f"The {kind.noun} must be a base64 data URL; files and remote URLs are not supported."
        )
    comma = url.find(",", 0, MAX_HEADER_CHARS)
    if comma < 0:
        raise _NotDecodable("The data URL has no comma before its data.")
    _, semicolon, last_parameter = url[5:comma].rpartition(";")
    if not semicolon or last_parameter.strip().lower() != "base64":
        raise _NotDecodable("The data URL must say ';base64' before its comma.")
    return url[comma + 1 :]


def _decode_base64(payload: str, max_bytes: int) -> bytes:
    if not payload.isascii():
        raise _bad_alphabet(payload)
    data = _without_white_space(payload)
    if not data:
        raise _NotDecodable("The data is empty.")
    padding = _padding(data)
    if len(data) // 4 * 3 - padding > max_bytes:
        raise _TooLarge
    try:
        return pybase64.b64decode(data, validate=True)
    except binascii.Error:
        raise _bad_alphabet(data) from None


def _without_white_space(payload: str) -> str:
    """Searches first: that is much faster than a copy, which most payloads don't need."""
    if any(character in payload for character in _WHITE_SPACE):
        return payload.translate(dict.fromkeys(map(ord, _WHITE_SPACE)))
    return payload


def _padding(data: str) -> int:
    """How many `=` end `data`: 0 to 2. Anywhere else, or too few of them, is an error."""
    first = data.find("=")
    padding = 0 if first < 0 else len(data) - first
    if len(data) % 4 or padding > 2:
        raise _NotDecodable("The base64 data is truncated or wrongly padded.")
    return padding


def _bad_alphabet(data: str) -> _NotDecodable:
    if "-" in data or "_" in data:
        return _NotDecodable("The URL-safe base64 alphabet is not supported; use '+' and '/'.")
    return _NotDecodable("The data contains characters that are not base64.")
