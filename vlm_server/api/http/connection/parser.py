"""A request parsed from bytes with h11: its head, then its body piece by piece.

Bounds the work of one call into h11: the lines of a head, and the framing of a chunked body, which
costs a hundred times more to parse than the same bytes if the chunks are tiny.
"""

from __future__ import annotations

import re

import h11

from vlm_server.errors import HeadersTooLarge, InvalidRequest, RequestError

MAX_HEAD_BYTES = 64 * 1024
MAX_HEAD_LINES = 128
MAX_FRAMING_BYTES = 128 * 1024
"""The most framing of a chunked body: sizes, extensions and line ends of chunks. 26,000 chunks of
one byte have this much."""
FREE_FRAMING = 64
"""The ratio of chunk to framing from which framing is unlimited: chunks of about 500 bytes."""

_MAX_LINE_BYTES = 16 * 1024
_EVENTS_PER_SLICE = 64
"""Events of h11 per slice, about a millisecond of work."""
_BLANK_LINE = re.compile(rb"\n\r?\n")


class HeadReader:
    """The arriving bytes of a request's head, and empty lines before it."""

    def __init__(self) -> None:
        self.buffer = bytearray()
        self._searched = 0

    def take_head(self) -> bytes | None:
        """The complete head, removed from the buffer. Raises HeadersTooLarge.

        Empty lines before a request are skipped: some clients send one after a body.
        """
        if not self._searched and self.buffer.startswith((b"\r", b"\n")):
            self.buffer[:] = self.buffer.lstrip(b"\r\n")
        end = _BLANK_LINE.search(self.buffer, max(0, self._searched - 2))
        size = end.end() if end else len(self.buffer)
        if size > MAX_HEAD_BYTES:
            raise HeadersTooLarge(f"The request's head is larger than {MAX_HEAD_BYTES} bytes.")
        if self.buffer.count(b"\n", 0, size) > MAX_HEAD_LINES:
            raise HeadersTooLarge(f"The request's head has more than {MAX_HEAD_LINES} lines.")
        if end is None:
            self._searched = size
            return None
        head = bytes(self.buffer[:size])
        del self.buffer[:size]
        self._searched = 0
        return head

    def take_body(self, num_bytes: int | None) -> bytes:
        """Remove and return `num_bytes` after the head, or all of them."""
        body = bytes(self.buffer[:num_bytes])
        del self.buffer[:num_bytes]
        return body


class RequestParser:
    """A request with a complete head. `http` is h11's state, also needed for the response."""

    def __init__(self, head: bytes) -> None:
        """Raises InvalidRequest if `head` is not a valid head of a request."""
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_LINE_BYTES)
        self.is_complete = False
        self.has_more = False
        """Whether `parse` has not reached the end of the bytes fed."""
        self._fed_bytes = 0
        self._body_bytes = 0
        self.http.receive_data(head)
        request = self._next()
        if not isinstance(request, h11.Request):
            raise InvalidRequest(_NOT_HTTP)
        self.request = request
        self._declared_bytes = _declared_bytes(request)

    @property
    def remaining_bytes(self) -> int | None:
        """Bytes of the body that have not arrived; None if the length was not declared."""
        if self._declared_bytes is None:
            return None
        return self._declared_bytes - self._body_bytes

    @property
    def rest(self) -> bytes:
        """Bytes that arrived after a complete request."""
        return self.http.trailing_data[0]

    def feed(self, data: bytes) -> None:
        """Add bytes that arrived after the head."""
        if data:  # h11 treats an empty piece as the end of the connection
            self._fed_bytes += len(data)
            self.http.receive_data(data)

    def parse(self) -> bytearray:
        """The next bytes of the body, as far as one slice goes. Raises InvalidRequest."""
        body = bytearray()
        self.has_more = False
        for _ in range(_EVENTS_PER_SLICE):
            event = self._next()
            if isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                self.is_complete = True
                break
            else:
                break
        else:
            self.has_more = True
        self._body_bytes += len(body)
        if self._declared_bytes is None and not self.is_complete:
            self._check_framing()
        return body

    def _next(self) -> object:
        try:
            return self.http.next_event()
        except h11.RemoteProtocolError as error:
            raise _explain(error) from None
        except ValueError:  # a Content-Length of thousands of digits
            raise InvalidRequest(_NOT_HTTP) from None

    def _check_framing(self) -> None:
        framing = self._fed_bytes - self._body_bytes - len(self.rest)
        if framing > MAX_FRAMING_BYTES + self._body_bytes // FREE_FRAMING:
            raise InvalidRequest("The request's body comes in too many small chunks.")


_NOT_HTTP = "This is not a valid HTTP/1.1 request."


def _explain(error: h11.RemoteProtocolError) -> RequestError:
    """The error without the client's bytes, which h11's messages quote."""
    if error.error_status_hint == 431:
        return HeadersTooLarge("A line of the request is too long.")
    if error.error_status_hint == 501:
        return InvalidRequest("The only Transfer-Encoding that is supported is chunked.")
    return InvalidRequest(_NOT_HTTP)


def _declared_bytes(request: h11.Request) -> int | None:
    """Length of the body in bytes; None if it is chunked.

    Raises InvalidRequest for two lengths, and for chunks in HTTP/1.0: a proxy in front may see
    another request in such bytes (RFC 9112, 6.1).
    """
    headers = dict(request.headers)
    if b"transfer-encoding" not in headers:
        return int(headers.get(b"content-length", b"0"))
    if b"content-length" in headers:
        raise InvalidRequest("A request has Content-Length or Transfer-Encoding, not both.")
    if request.http_version < b"1.1":
        raise InvalidRequest("HTTP/1.0 has no Transfer-Encoding; send Content-Length.")
    return None
