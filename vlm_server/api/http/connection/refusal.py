"""A response without an application: for what is no request, or must not become one."""

from __future__ import annotations

import http
import uuid

from vlm_server.api.http import errors
from vlm_server.api.http.errors import EncodeError
from vlm_server.errors import RequestError


def refusal(error: RequestError, encode: EncodeError, headers: list[tuple[bytes, bytes]]) -> bytes:
    """`error` as a whole response on the wire, after which the connection is closed.

    `headers` are those of every response.
    """
    request_id = uuid.uuid4().hex
    own = {"X-Request-Id": request_id, "Request-Id": request_id, "Connection": "close"}
    response = errors.response(error, encode, retry_after_seconds=1, headers=own)
    status = http.HTTPStatus(error.status)
    lines = [b"HTTP/1.1 %d %s" % (status, status.phrase.encode())]
    lines += [b"%s: %s" % header for header in (*headers, *response.raw_headers)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body)
