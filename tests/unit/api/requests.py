"""Test requests in OpenAI's dialect."""

from __future__ import annotations

from typing import Any

from tests.support.image_files import data_url, image_file

ROUTE = "/v1/chat/completions"
PNG_URL = data_url(image_file("PNG"))


def bearer(key: str) -> dict[str, str]:
    """The headers of a client with this key."""
    return {"authorization": f"Bearer {key}"}


def user(*content: dict[str, Any] | str) -> dict[str, Any]:
    if len(content) == 1 and isinstance(content[0], str):
        return {"role": "user", "content": content[0]}
    return {"role": "user", "content": list(content)}


def text(words: str = "What is this?") -> dict[str, Any]:
    return {"type": "text", "text": words}


def image_part(url: str = PNG_URL) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": list(messages) or [user("hi")], **fields}


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    """A tool in the shape of OpenAI's chat completions."""
    return {"type": "function", "function": {"name": name, **fields}}


def called(id: str, name: str = "f", arguments: Any = "{}") -> dict[str, Any]:
    """A tool call in the history."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


def result(id: str, *content: dict[str, Any] | str) -> dict[str, Any]:
    return {**user(*content), "role": "tool", "tool_call_id": id}
