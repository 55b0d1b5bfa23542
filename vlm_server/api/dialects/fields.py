"""Types and bounds of request fields, the same in several dialects."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, structs

from vlm_server.api.parsing import json_body
from vlm_server.api.parsing.calls import Context, ParsedRequest
from vlm_server.errors import InvalidRequest

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_TOP_LOGPROBS = 20

Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Size = Annotated[int, Meta(ge=1, le=INT32_MAX)]
TopK = Annotated[int, Meta(ge=-1, le=INT32_MAX)]
Seed = Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=2)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORT_RULE = "must be 'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or 'max'"
ImageDetail = Literal["auto", "low", "high", "original"]
"""`low` scales an image down; `high` and `original` scale a small one up."""


def checked_prompt(text: str, context: Context) -> str:
    """`text`, the field `prompt`. Raises InvalidRequest beyond `limits.max_text_bytes`."""
    limit = context.limits.max_text_bytes
    if json_body.utf8_length(text, "prompt") > limit:
        message = f"At most {limit} bytes of text are allowed (limits.max_text_bytes)."
        raise InvalidRequest(message, "prompt")
    return text


def only_counted(parsed: ParsedRequest) -> ParsedRequest:
    """`parsed` as a request whose prompt's tokens are counted, and that generates nothing."""
    submit = structs.replace(parsed.submit, count_only=True)
    return structs.replace(parsed, submit=submit, stream=False, options=b"")
