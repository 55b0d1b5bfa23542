"""Decoding of base64 data URLs (RFC 2397, RFC 4648).

The scheme and `base64` are case-insensitive, parameters such as `charset` may precede `base64`,
and whitespace inside the base64 is skipped. The MIME type is ignored: the format is read from
the bytes. The URL-safe alphabet, percent escapes and missing padding are refused.
"""

from __future__ import annotations

import binascii
import re

import pybase64

from vlm_server.api.parsing.media.external import HASH_PREFIX, MediaUrl

MAX_HEADER_CHARS = 1024
_BYTES_LITERAL = re.compile("b['\"]")
_IS_BYTES_LITERAL = (
    "The base64 is written as Python's bytes (b'...'): decode it to text first, with `.decode()`."
)
_FRAME_LIST = re.compile(r"data:\s*video/jpe?g\s*[;,]", re.IGNORECASE)
"""vLLM's form of a video: its frames as JPEG images, separated by commas."""
_BASE64 = re.compile(r"[A-Za-z0-9+/=\s]{40,}")
_ALPHABET = re.compile(r"[A-Za-z0-9+/=]*")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{1,9}):")
_PATH = re.compile(r"(?:~|\.{0,2}/|[A-Za-z]:[\\/]).*\.[A-Za-z0-9]{2,5}|[^/\\:]+\.[a-zA-Z]{3,4}")
_MAX_PATH_CHARS = 4096
_PROBED_CHARS = 256
_WHITE_SPACE = " \t\r\n\f"


def decode(media: MediaUrl) -> bytes:
    """The bytes in a data URL.

    Raises the error of its kind (`MediaUrl.invalid`) for another URL, and PayloadTooLarge, before
    decoding.
    """
    url = media.url
    if url[:5].lower() != "data:":
        raise media.invalid(_not_a_data_url(url, media.kind))
    return _decode_base64(url[_start_of_data(media) :], media)


def is_frame_list(url: str) -> bool:
    """Whether `url` is vLLM's form of a video, for `split_frames`."""
    return _FRAME_LIST.match(url) is not None


def split_frames(media: MediaUrl, max_frames: int) -> list[str]:
    """The base64 of each frame in a frame list. Raises InvalidVideo."""
    start = _start_of_data(media)
    if media.url.count(",", start) >= max_frames:
        raise media.invalid(f"A list of frames has at most {max_frames} images.")
    return media.url[start:].split(",")


def _start_of_data(media: MediaUrl) -> int:
    """The place in a data URL after its comma. Raises InvalidImage or InvalidVideo."""
    url = media.url
    comma = url.find(",", 0, MAX_HEADER_CHARS)
    if comma < 0:
        raise media.invalid("The data URL has no comma before its data.")
    _, semicolon, last_parameter = url[5:comma].rpartition(";")
    if not semicolon or last_parameter.strip().lower() != "base64":
        raise media.invalid("The data URL must say ';base64' before its comma.")
    return comma + 1


def decode_base64(media: MediaUrl) -> bytes:
    """The bytes in `media.url`, plain base64. Raises as `decode`."""
    if media.url[:5].lower() == "data:":
        raise media.invalid("This must be the base64 alone, without the 'data:...,' before it.")
    if place := _place(media.url):
        raise media.invalid(f"This must be the base64 of the {media.kind}, not {place}.")
    return _decode_base64(media.url, media)


def _not_a_data_url(url: str, kind: str) -> str:
    if _BYTES_LITERAL.match(url):
        return _IS_BYTES_LITERAL
    if not url:
        return f"The {kind}'s URL is empty."
    if url.startswith(HASH_PREFIX):
        return f"After `{HASH_PREFIX}` there must be 64 hex digits in lower case."
    start = f"'data:{'application/pdf' if kind == 'document' else f'{kind}/...'};base64,'"
    if _BASE64.fullmatch(url[:_PROBED_CHARS]):
        return f"The {kind} must be a base64 data URL: write {start} before the base64."
    place = _place(url)
    what_it_is = f", not {place}" if place else ""
    return (
        f"The {kind} must be a base64 data URL, which begins with {start}, or an https: or "
        f"file: URL that the settings urls.https_hosts or urls.file_folders allow{what_it_is}."
    )


def _place(text: str) -> str | None:
    """A description of `text` if it is a path or URL: base64 has neither colon nor full stop."""
    if len(text) > _MAX_PATH_CHARS:
        return None
    if _PATH.fullmatch(text):
        return "a path"
    scheme = _SCHEME.match(text)
    return f"a URL of the scheme `{scheme[1].lower()}:`" if scheme else None


def _decode_base64(data: str, media: MediaUrl) -> bytes:
    if data[:5].lower() == "data:":
        raise media.invalid("The data URL holds another one: it has 'data:...;base64,' twice.")
    if _BYTES_LITERAL.match(data):
        raise media.invalid(_IS_BYTES_LITERAL)
    if not data.isascii():
        raise media.invalid(_fault_of(data))
    if any(character in data for character in _WHITE_SPACE):  # rare
        data = data.translate(dict.fromkeys(map(ord, _WHITE_SPACE)))
    if not data:
        raise media.invalid("The data is empty.")
    first = data.find("=")
    padding = 0 if first < 0 else len(data) - first
    if len(data) % 4 or padding > 2:
        raise media.invalid(_fault_of(data))
    if len(data) // 4 * 3 - padding > media.max_bytes:
        raise media.too_large()
    try:
        return pybase64.b64decode(data, validate=True)
    except binascii.Error:
        raise media.invalid(_fault_of(data)) from None


def _fault_of(data: str) -> str:
    """The reason why `data` is invalid base64."""
    if _ALPHABET.fullmatch(data):
        return "The base64 data is truncated or wrongly padded."
    if "%" in data:
        return "The data has percent escapes, such as %2B for '+': undo them."
    if "-" in data or "_" in data:
        return "The URL-safe base64 alphabet is not supported; use '+' and '/'."
    return "The data contains characters that are not base64."
