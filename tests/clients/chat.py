"""Messages and tools in the shape of OpenAI's chat completions."""

from __future__ import annotations

from typing import Any

from tests.clients.screen import NOTHING, POINT


def user(*content: Any) -> Any:
    """A user's message; strings become text parts."""
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return {"role": "user", "content": parts}


def tool(name: str, parameters: dict[str, Any]) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("screenshot", NOTHING), tool("click", POINT)]
