"""How a client wants its message: from the intake to the renderer."""

from __future__ import annotations

import msgspec


class Options(msgspec.Struct, frozen=True):
    """Without `shows_thoughts`, thoughts are announced, and left out."""

    shows_thoughts: bool = True


encode_options = msgspec.msgpack.Encoder().encode
decode_options = msgspec.msgpack.Decoder(Options).decode
