"""Test requests for OpenAI's Responses."""

from __future__ import annotations

from typing import Any

ROUTE = "/v1/responses"


def asking(given: Any = "Hi", **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "input": given, **fields}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object"}, **fields}
