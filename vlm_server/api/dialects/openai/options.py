"""How a client wants its chat completion: from the intake to the renderer."""

from __future__ import annotations

import msgspec


class Options(msgspec.Struct, frozen=True):
    """`include_usage` at the end of a stream, `continuous_usage` in all of its chunks."""

    include_usage: bool = False
    continuous_usage: bool = False


encode_options = msgspec.msgpack.Encoder().encode
decode_options = msgspec.msgpack.Decoder(Options).decode
