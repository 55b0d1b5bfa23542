"""Script steps with Ollama's own rendering."""

from __future__ import annotations

from tests.unit.api.scripted_engine import Step
from vlm_server.protocol import Delta, Tokens, ToolCallDelta


def called(index: int = 0, id: str = "", name: str = "", arguments: str = "") -> Step:
    call = ToolCallDelta(index, id, name, arguments)
    return lambda request_id: Tokens((Delta(request_id, "", tool_call=call),))
