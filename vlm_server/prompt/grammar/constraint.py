"""What an answer is held to: one value for each way, which is also the key of its grammar.

The process that compiles it reads the schemas: what is wrong with them is found there.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from vlm_server.errors import InvalidRequest
from vlm_server.protocol import Tools

SCHEMA_PARAM, TOOLS_PARAM = "response_format.json_schema.schema", "tools"
"""The fields of a request that constraints come from."""
Mark = tuple[int | str, ...]
"""The text before or after a call: control tokens by their id, and what is between them."""


class CallSyntax(msgspec.Struct, frozen=True):
    """How a model writes a call that it makes freely; see `ToolParser`.

    start_text: `start` as it reads.
    is_json: whether `{"name": ..., "arguments": {...}}` stands between the marks.
    """

    start: Mark
    end: Mark
    start_text: str
    is_json: bool


class _Constraint(msgspec.Struct, frozen=True):
    param: ClassVar[str] = TOOLS_PARAM
    """The field of the request that it comes from."""
    subject: ClassVar[str] = "the schema of these tools"

    def refusal(self, reason: str) -> InvalidRequest:
        """Why it can't be obeyed, as the client is told."""
        return InvalidRequest(f"{self.subject} can't be obeyed: {reason}", self.param)


class Schema(_Constraint, frozen=True, tag="schema"):
    """JSON that conforms to `schema`, the text of one."""

    param: ClassVar[str] = SCHEMA_PARAM
    subject: ClassVar[str] = "this schema"
    schema: str


class ForcedCalls(_Constraint, frozen=True, tag="forced"):
    """Nothing but calls: `[{"name": ..., "arguments": {...}}, ...]`."""

    tools: Tools


class FreeCalls(_Constraint, frozen=True, tag="free"):
    """Any text with calls; the arguments of strict tools conform to their schemas.

    With a `schema`, the answer is either JSON that conforms to it, or calls and nothing else.
    """

    tools: Tools
    syntax: CallSyntax
    schema: str | None = None


Constraint = Schema | ForcedCalls | FreeCalls

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Constraint] = msgspec.json.Decoder(Constraint)


def encode(constraint: Constraint) -> bytes:
    """Equal constraints give the same bytes."""
    return _encoder.encode(constraint)


def decode(body: bytes | bytearray) -> Constraint:
    """What was encoded."""
    return _decoder.decode(body)
