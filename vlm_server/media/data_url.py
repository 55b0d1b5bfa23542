"""Base64 data URLs. Knows RFC 2397 and RFC 4648; knows nothing of pictures.

The scheme and `base64` may be written in any case, parameters such as `charset` may stand
before `base64`, and white space inside the base64 is skipped. The MIME type is not read: the
bytes say what they are. The URL-safe alphabet, percent escapes and missing padding are refused.
"""

from __future__ import annotations

import binascii

from vlm_server.errors import InvalidImage, PayloadTooLarge

MAX_HEADER_CHARS = 1024
_CHUNK_BYTES = 1 << 20  # a multiple of 4; the interpreter lock is free between two chunks


def decode(url: str, param: str, max_bytes: int) -> bytes:
    """The bytes that `url` carries.

    `param` names the part in errors. Raises InvalidImage if `url` is not a base64 data URL,
    and PayloadTooLarge, before decoding, if it holds more than `max_bytes`.
    """
    return _decode_base64(_payload(url, param), param, max_bytes)


def _payload(url: str, param: str) -> str:
    if url[:5].lower() != "data:":
        raise InvalidImage(
            "A picture must be a base64 data URL; files and remote addresses are not read.", param
        )
    comma = url.find(",", 0, MAX_HEADER_CHARS)
    if comma < 0:
        raise InvalidImage("The data URL has no comma before its data.", param)
    _, semicolon, last_parameter = url[5:comma].rpartition(";")
    if not semicolon or last_parameter.strip().lower() != "base64":
        raise InvalidImage("The data URL must say ';base64' before its comma.", param)
    return url[comma + 1 :]


def _decode_base64(payload: str, param: str, max_bytes: int) -> bytes:
    data = _without_white_space(payload, param)
    if not data:
        raise InvalidImage("The data URL is empty.", param)
    padding = _padding(data, param)
    if len(data) // 4 * 3 - padding > max_bytes:
        raise PayloadTooLarge(f"The picture is larger than {max_bytes} bytes.", param)
    view = memoryview(data)
    try:
        return b"".join(
            binascii.a2b_base64(view[start : start + _CHUNK_BYTES], strict_mode=True)
            for start in range(0, len(data), _CHUNK_BYTES)
        )
    except binascii.Error:
        raise _bad_alphabet(data, param) from None


def _without_white_space(payload: str, param: str) -> bytes:
    try:
        return payload.encode("ascii").translate(None, b" \t\r\n\f")
    except UnicodeEncodeError:
        raise _bad_alphabet(b"", param) from None


def _padding(data: bytes, param: str) -> int:
    """How many `=` end `data`: 0 to 2. Anywhere else, or too few of them, is an error."""
    first = data.find(b"=")
    padding = 0 if first < 0 else len(data) - first
    if len(data) % 4 or padding > 2:
        raise InvalidImage("The base64 data is cut short or wrongly padded.", param)
    return padding


def _bad_alphabet(data: bytes, param: str) -> InvalidImage:
    if b"-" in data or b"_" in data:
        return InvalidImage("The URL-safe base64 alphabet is not taken; use '+' and '/'.", param)
    return InvalidImage("The data URL holds characters that are not base64.", param)
