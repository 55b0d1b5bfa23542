"""Recorded requests of Claude Code reach a scripted engine: a tool loop, and `/context`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from tests.unit.api.scripted_engine import ScriptedEngine
from vlm_server.protocol import ImagePart, TextPart, ToolCall

CLIENTS = Path(__file__).parents[4] / "data" / "clients"


def recorded(name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((CLIENTS / f"{name}.json").read_text(encoding="utf-8"))
    return body


async def send(client: httpx.AsyncClient, request: dict[str, Any]) -> httpx.Response:
    headers = {**request["headers"], "x-api-key": "none", "authorization": "Bearer none"}
    answer = await client.post(request["path"], json=request["body"], headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


async def test_claude_code_first_request_is_streamed_to_its_end(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    assert (await client.head("/")).status_code == 200
    answer = await send(client, recorded("claude_code"))
    assert answer.text.rstrip().endswith('data: {"type":"message_stop"}')
    assert answer.headers["x-vlm-ignored"].split(", ") == [
        "messages[].content[].cache_control",
        "system[].cache_control",
        "metadata",
        "context_management",
        "x-anthropic-billing-header",
    ]
    (submit,) = engine.submitted
    assert [message.role for message in submit.messages] == ["system", "user", "system"]
    assert len(submit.messages[0].content) == 2
    assert submit.template.enable_thinking
    assert submit.sampling.max_tokens == 32000
    assert submit.tools is not None
    assert len(json.loads(submit.tools.definitions)) == 3


async def test_claude_code_image_result_reaches_engine(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    await send(client, recorded("claude_code_tool_result"))
    *_, assistant, result = engine.submitted[0].messages
    assert assistant.reasoning == "I should look."
    assert assistant.content == (TextPart("Let me look."),)
    assert assistant.tool_calls == (ToolCall("call_1", "Read", '{"file_path": "/work/shot.png"}'),)
    assert (result.role, result.content, result.name) == ("tool", (ImagePart(0),), "Read")


async def test_claude_code_next_request_repeats_earlier_turns(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    """Without equal turns the prefix cache would miss, whatever the billing header contains."""
    first, second = recorded("claude_code"), recorded("claude_code_tool_result")
    second["body"]["system"][0]["text"] += " cch=12345;"
    await send(client, first)
    await send(client, second)
    before, after = engine.submitted
    assert after.messages[: len(before.messages)] == before.messages
    assert after.tools == before.tools


async def test_claude_code_token_count_submits_count_only(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    request = recorded("claude_code_count_tokens")
    assert (await send(client, request)).json() == {"input_tokens": 7}
    assert engine.submitted[0].count_only
    assert engine.submitted[0].tools is not None
    assert len(json.loads(engine.submitted[0].tools.definitions)) == 2
