"""The parts of an endless multipart body, as cameras and ffmpeg send them (RFC 2046, 5.1).

A part with a declared length is complete with its last byte; any other when the next one begins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from vlm_server.errors import InvalidRequest, PayloadTooLarge, UnsupportedMediaType

_MAX_HEAD_BYTES = 8192
_LENGTH = re.compile(
    rb"^content-length:[ \t]*([0-9]{1,12})[ \t]*\r?$", re.IGNORECASE | re.MULTILINE
)
_HEAD_END = re.compile(rb"\r?\n\r?\n")
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))\s*(?:;|$)', re.IGNORECASE)


def boundary_of(content_type: str) -> bytes:
    """The boundary in a Content-Type. Raises UnsupportedMediaType."""
    match = _BOUNDARY.search(content_type)
    if match is None or not content_type.isascii():
        raise UnsupportedMediaType("A multipart Content-Type needs a `boundary`.")
    name: str = match[1] or match[2]
    return b"--" + name.removeprefix("--").encode()  # some cameras write the hyphens, too


class PartReader:
    """Splits a body into its parts, as it arrives, of at most `max_bytes` each."""

    def __init__(self, boundary: bytes, max_bytes: int) -> None:
        self.is_over = False
        """Whether the last boundary has come."""
        self._boundary = boundary
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._start = -1
        """Where the current part begins; -1 before its head is complete."""
        self._end: int | None = None
        """Where the current part ends, if that is declared."""
        self._searched = 0
        """Bytes of the buffer in which the next boundary is not."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The contents of the parts that are complete with `data`.

        Raises InvalidRequest, or PayloadTooLarge.
        """
        if self.is_over:
            return
        self._buffer += data
        while not self.is_over:
            if self._start < 0 and not self._find_start():
                return
            content = self._take()
            if content is None:
                return
            yield content

    def _find_start(self) -> bool:
        """Read up to the end of a part's head."""
        begin = self._buffer.find(self._boundary)
        if begin < 0:
            self._check(len(self._buffer) <= _MAX_HEAD_BYTES)
            return False
        after = begin + len(self._boundary)
        if self._buffer[after : after + 2] == b"--":
            self.is_over = True
            return False
        match = _HEAD_END.search(self._buffer, after, after + _MAX_HEAD_BYTES)
        if match is None:
            self._check(len(self._buffer) - after < _MAX_HEAD_BYTES)
            return False
        length = _LENGTH.search(self._buffer, after, match.end())
        self._start = match.end()
        if length and int(length[1]) > self._max_bytes:
            raise self._too_large()
        self._end = self._start + int(length[1]) if length else None
        self._searched = self._start
        return True

    def _take(self) -> bytes | None:
        """The content of the current part, if its end is there."""
        if self._end is not None:
            return self._cut(self._end) if len(self._buffer) >= self._end else None
        end = self._buffer.find(self._boundary, self._searched)
        if end < 0:
            self._searched = max(self._searched, len(self._buffer) - len(self._boundary))
            if len(self._buffer) - self._start > self._max_bytes + len(self._boundary):
                raise self._too_large()
            return None
        content = self._cut(end)
        content = content[:-2] if content.endswith(b"\r\n") else content.removesuffix(b"\n")
        if len(content) > self._max_bytes:
            raise self._too_large()
        return content

    def _cut(self, end: int) -> bytes:
        """Remove everything up to `end`, where the current part's content ends."""
        content = bytes(self._buffer[self._start : end])
        del self._buffer[:end]
        self._start = -1
        return content

    def _check(self, is_right: bool) -> None:
        if not is_right:
            raise InvalidRequest("The multipart body has no part where one should begin.")

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"A part is larger than {self._max_bytes} bytes (limits.max_image_bytes)."
        )
