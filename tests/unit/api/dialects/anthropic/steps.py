"""Requests and scripts for Anthropic's dialect."""

from __future__ import annotations

import base64
from typing import Any

from tests.support.image_files import image_file
from tests.unit.api.requests import user
from tests.unit.api.scripted_engine import Step
from vlm_server.protocol import Delta, FinishReason, Tokens, ToolCallDelta

ROUTE = "/v1/messages"
COUNT_ROUTE = "/v1/messages/count_tokens"
PNG = base64.b64encode(image_file("PNG")).decode()
IMAGE_BLOCK: dict[str, Any] = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": PNG},
}
LOOK: dict[str, Any] = {
    "name": "look",
    "description": "Takes a screenshot.",
    "input_schema": {"type": "object", "properties": {"screen": {"type": "integer"}}},
}


def text(words: str = "What is this?") -> dict[str, Any]:
    return {"type": "text", "text": words}


def assistant(*content: dict[str, Any] | str) -> dict[str, Any]:
    return {**user(*content), "role": "assistant"}


def call(call_id: str = "call_1", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "look", "input": arguments}


def result(*content: dict[str, Any], call_id: str = "call_1", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": list(content), **fields}


def request(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "max_tokens": 9, "messages": list(messages) or [user("hi")], **fields}


def calls(arguments: str, call_id: str = "", name: str = "", index: int = 0) -> Step:
    more = ToolCallDelta(index, call_id, name, arguments)
    return lambda request_id: Tokens((Delta(request_id, "", tool_call=more),))


def stopped_at(stop: str | None, reason: FinishReason = "stop") -> Step:
    return lambda request_id: Tokens((Delta(request_id, "", finish_reason=reason, stop=stop),))
