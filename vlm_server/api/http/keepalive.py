"""What a silent stream sends: the setting's, or what a request's header asks for."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec
from starlette.datastructures import Headers

from vlm_server.errors import InvalidRequest
from vlm_server.settings import Server

Keepalive = Literal["comment", "empty_chunk", "off"]
HEADER = "X-VLM-Keepalive"


def wanted(headers: Headers, server: Server) -> Keepalive:
    """Raises InvalidRequest for a header that is none of the three."""
    try:
        mode: Keepalive = msgspec.convert(headers.get(HEADER, server.keepalive), Keepalive)
    except msgspec.ValidationError:
        choices = ", ".join(get_args(Keepalive))
        raise InvalidRequest(f"{HEADER} must be one of: {choices}.") from None
    return mode
