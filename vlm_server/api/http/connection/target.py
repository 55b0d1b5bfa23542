"""A request as ASGI's scope, from its head."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

import h11
from starlette.types import Scope

RECEIVED_AT = "vlm_server.received_at"
"""In a scope: when the head was complete, on the monotonic clock."""

_ABSOLUTE = re.compile(rb"https?://(?P<host>[^/?#]*)(?P<rest>.*)", re.IGNORECASE)


def scope_of(request: h11.Request, peers: dict[str, Any]) -> Scope:
    """`request` as a scope, with what `peers` says of the connection.

    A target may be an absolute URI. Then its host takes the place of the Host header, as RFC 9112
    (3.2.2) demands, so that whoever checks Host checks it.
    """
    target, headers = request.target, list(request.headers)
    if match := _ABSOLUTE.fullmatch(target):
        target = match["rest"] if match["rest"].startswith(b"/") else b"/" + match["rest"]
        headers = [header for header in headers if header[0] != b"host"]
        headers.append((b"host", match["host"]))
    raw_path, _, query = target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": request.http_version.decode("ascii"),
        "scheme": "http",
        "method": request.method.decode("ascii"),
        "root_path": "",
        "path": unquote(raw_path.decode("ascii")),
        "raw_path": raw_path,
        "query_string": query,
        "headers": headers,
        **peers,
    }
