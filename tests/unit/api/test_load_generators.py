"""Recorded requests of guidellm and aiperf with images, and the figures they read in answers.

Both are run by hand: docs/performance.md has the command lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.api.requests import ROUTE
from tests.unit.api.scripted_engine import ScriptedEngine, Step, calls, ended, finished, text
from vlm_server.protocol import Usage

FOLDER = Path(__file__).parents[2] / "data" / "clients"
RECORDS: dict[str, Any] = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in FOLDER.glob("*.json")
    if path.stem.startswith(("guidellm", "aiperf"))
}
STREAMED = sorted(name for name, record in RECORDS.items() if record["body"].get("stream"))
WORDS = [f"w{i} " for i in range(16)]
USAGE = Usage(211, 16, 3)
WRITES: tuple[Step, ...] = (*map(text, WORDS), ended("length"), finished(USAGE))
CALLS: tuple[Step, ...] = (
    calls(0, id="call_1", name="get_data"),
    *(calls(0, piece) for piece in ('{"query": ', '"x"}')),
    *(ended("tool_calls"), finished(USAGE)),
)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, as both read them: by their `data` only."""
    lines = answer.text.splitlines()
    data = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
    return [json.loads(entry) for entry in data if entry != "[DONE]"]


def words_of(event: dict[str, Any]) -> str:
    """The text in one event of any dialect; also the arguments of a call."""
    if event.get("choices"):
        (choice,) = event["choices"]
        delta = choice.get("delta", {})
        called = "".join(call["function"]["arguments"] for call in delta.get("tool_calls", ()))
        return called or choice.get("text") or delta.get("content") or ""
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    if event.get("type") == "content_block_delta":
        return str(event["delta"]["text"])
    return ""


def usage_of(event: dict[str, Any]) -> tuple[int, int]:
    """Tokens of the prompt and of the answer, from the last event that has a usage."""
    usage = event.get("response", event)["usage"]
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["completion_tokens"]
    cached = usage.get("cache_read_input_tokens", 0)
    return usage["input_tokens"] + cached, usage["output_tokens"]


@pytest.mark.parametrize("name", STREAMED)
async def test_load_generator_gets_chunk_per_token_and_usage(
    client: httpx.AsyncClient, engine: ScriptedEngine, name: str
) -> None:
    record = RECORDS[name]
    forced = record["body"].get("tool_choice") == "required"
    engine.script = CALLS if forced else WRITES
    answer = await client.post(record.get("path", ROUTE), json=record["body"])
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "x-vlm-ignored" not in answer.headers
    stream = events(answer)
    pieces = [words for words in map(words_of, stream) if words]
    assert pieces == (['{"query": ', '"x"}'] if forced else WORDS), "a chunk for each token"
    assert usage_of([event for event in stream if "usage" in event.get("response", event)][-1]) == (
        (211, 16)
    )


@pytest.mark.parametrize("name", sorted(RECORDS))
async def test_load_generator_fields_reach_engine(
    client: httpx.AsyncClient, engine: ScriptedEngine, name: str
) -> None:
    record = RECORDS[name]
    body = record["body"]
    engine.script = WRITES
    await client.post(record.get("path", ROUTE), json=body)
    (submit,) = engine.submitted
    assert submit.sampling.ignore_eos == body.get("ignore_eos", False)
    limits = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    wanted = [body[limit] for limit in limits if limit in body]
    assert [submit.sampling.max_tokens] == wanted or not wanted
    assert len(submit.images) == json.dumps(body).count("image/")


async def test_load_generator_probes_are_answered(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).status_code == 200
    assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["demo"]
    assert (await client.head("/metrics")).status_code == 200
