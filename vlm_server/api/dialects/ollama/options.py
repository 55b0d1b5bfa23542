"""How a client wants its answer: from the intake to the renderer."""

from __future__ import annotations

import msgspec


class AnswerOptions(msgspec.Struct, frozen=True):
    """`model` is the name that the client used. `done_reason` is that of an answer to a request
    that asks nothing; empty if the model is asked."""

    model: str
    done_reason: str = ""


encode_options = msgspec.msgpack.Encoder().encode
decode_options = msgspec.msgpack.Decoder(AnswerOptions).decode
