"""How a client wants its response: from the intake to the renderer."""

from __future__ import annotations

import msgspec


class Options(msgspec.Struct, frozen=True):
    """`echo` is the JSON of an object: what the response repeats of its request.

    `items` is the JSON of the list of the request's own items, and empty if nothing of the response
    shall be stored. `owner` is whose it is. `namespaces` are those of tools, by the tools' names.
    """

    owner: str
    echo: bytes
    items: bytes = b""
    previous_response_id: str | None = None
    namespaces: dict[str, str] = {}


encode_options = msgspec.msgpack.Encoder().encode
decode_options = msgspec.msgpack.Decoder(Options).decode
