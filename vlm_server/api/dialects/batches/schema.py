"""The body of a new batch."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, Struct

from vlm_server.api.dialects.fields import prepare
from vlm_server.api.parsing import json_body
from vlm_server.api.parsing.ignored_fields import IgnoredFields, known_fields
from vlm_server.errors import InvalidRequest

MAX_HOURS = 720
Endpoint = Literal[
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
]
*_FIRST, _LAST = get_args(Endpoint)
_RULES = {
    "endpoint": f"must be {', '.join(map(repr, _FIRST))} or {_LAST!r}",
    "completion_window": "must be a number of hours, as '24h', or of days, as '7d'",
    "metadata": "must have at most 16 names of 64 and values of 512 characters",
}
_Name = Annotated[str, Meta(max_length=64)]
_Value = Annotated[str, Meta(max_length=512)]


class BatchRequest(Struct, forbid_unknown_fields=True):
    """OpenAI's request; `completion_window` may have other hours than theirs, or days."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Annotated[str, Meta(pattern="^[1-9][0-9]{0,2}[hd]$")]
    metadata: Annotated[dict[_Name, _Value], Meta(max_length=16)] | None = None

    @property
    def hours(self) -> int:
        number = int(self.completion_window[:-1])
        return number * 24 if self.completion_window.endswith("d") else number


prepare(BatchRequest)


def parse(fields: dict[str, Any], ignored: IgnoredFields, *, refuses: bool) -> BatchRequest:
    """The request. Raises InvalidRequest and UnsupportedField."""
    known = known_fields(fields, BatchRequest, ignored, refuses=refuses)
    request = json_body.convert(known, BatchRequest, _RULES)
    if request.hours > MAX_HOURS:
        raise InvalidRequest("`completion_window` is at most '30d'.", "completion_window")
    return request
