"""Invariants of all dialects: usage, refusals, reported fields, failing streams."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from tests.unit.api.conftest import Connect
from tests.unit.api.requests import assistant, called, chat, result, tool, user
from tests.unit.api.scripted_engine import (
    ScriptedEngine,
    ended,
    ends_with,
    failed,
    finished,
    thinks,
)
from tests.unit.api.scripted_engine import text as says
from vlm_server.api.dialects.ollama import model_fields
from vlm_server.api.http import access_log
from vlm_server.api.http.access_log import AnsweredRequests
from vlm_server.api.http.ended_requests import EndedRequests
from vlm_server.api.http.middleware import RequestLog
from vlm_server.api.parsing.common_fields import model_wanted
from vlm_server.api.parsing.ignored_fields import MAX_NAMES
from vlm_server.api.parsing.parsed_request import Context, KnownModel
from vlm_server.errors import InvalidRequest
from vlm_server.protocol import (
    Finished,
    ImageUse,
    ModelFacts,
    Submit,
    Usage,
    VideoUse,
)
from vlm_server.settings import Limits, ModelSettings, Server, Settings

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
OLLAMA, GENERATE, RESPONSES = "/api/chat", "/api/generate", "/v1/responses"
BEGUN = [user("Tell."), {"role": "assistant", "content": "Once"}]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
ANTHROPIC_SCHEMA = {"format": {"type": "json_schema", "schema": SCHEMA}}
ANTHROPIC_TOOL = {"name": "f", "input_schema": SCHEMA}


def body(route: str, **fields: Any) -> dict[str, Any]:
    """A short request to `route`."""
    request: dict[str, Any] = {"messages": [user("hi")]}
    if route in (COMPLETIONS, GENERATE):
        request = {"prompt": "hi"}
    if route == RESPONSES:
        request = {"input": "hi"}
    if route in (OLLAMA, GENERATE):
        request["stream"] = False
    return {"model": "demo", **request, **fields}


async def send(client: httpx.AsyncClient, route: str, **fields: Any) -> httpx.Response:
    content = json.dumps(body(route, **fields))  # which escapes lone surrogates
    return await client.post(route, content=content, headers={"content-type": "application/json"})


def error_of(answer: httpx.Response) -> Any:
    """The error of an answer; a text in Ollama's dialect."""
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


# ---- sizes of images -----------------------------------------------------------------


def usage_in(route: str, answer_text: str, *, stream: bool) -> Any:
    """The usage of an answer, or of the stream event that has all of it."""
    if not stream:
        return json.loads(answer_text)["usage"]
    lines = [line.removeprefix("data: ") for line in answer_text.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    whole = [event.get("response", {}) if route == RESPONSES else event for event in events]
    usages = [event.get("usage") for event in whole if "usage" in event]
    return [usage for usage in usages if usage][-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", [CHAT, MESSAGES, RESPONSES, OLLAMA, GENERATE])
async def test_usage_of_every_dialect_has_image_sizes(
    client: httpx.AsyncClient, engine: ScriptedEngine, route: str, stream: bool
) -> None:
    image = ImageUse(308, 196, 77)
    engine.script = (
        *(says("A cat."), ended()),
        lambda request_id: Finished(request_id, Usage(99, 2), images=(image,)),
    )
    fields: dict[str, Any] = {"stream_options": {"include_usage": True}} if route == CHAT else {}
    answer = await send(client, route, stream=stream, **(fields if stream else {}))
    assert answer.status_code == 200, answer.text
    usage = usage_in(route, answer.text, stream=stream)
    assert usage["images"] == [{"width": 308, "height": 196, "tokens": 77}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", [CHAT, RESPONSES])
async def test_usage_of_video_dialects_has_video_frames(
    client: httpx.AsyncClient, engine: ScriptedEngine, route: str, stream: bool
) -> None:
    video = VideoUse(2, 5.5, 900, True, 64, 32, (0.0, 5.5))
    engine.script = (
        *(says("A cat runs."), ended()),
        lambda request_id: Finished(request_id, Usage(99, 2), videos=(video,)),
    )
    fields: dict[str, Any] = {"stream_options": {"include_usage": True}} if route == CHAT else {}
    answer = await send(client, route, stream=stream, **(fields if stream else {}))
    assert usage_in(route, answer.text, stream=stream)["videos"] == [
        {"frames": 2, "seconds": 5.5, "tokens": 900, "truncated": True}
        | {"width": 64, "height": 32, "times": [0.0, 5.5]}
    ]


# ---- the model -------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, ""])
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, MESSAGES, RESPONSES, OLLAMA, GENERATE])
async def test_single_model_need_not_be_named(
    client: httpx.AsyncClient, route: str, name: str | None
) -> None:
    unnamed = {key: value for key, value in body(route).items() if key != "model"}
    for request in (unnamed, {**unnamed, "model": name}):
        answer = await client.post(route, json=request)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "demo"


@pytest.mark.parametrize("name", [None, ""])
def test_request_must_name_one_of_several_models(name: str | None) -> None:
    known = (KnownModel("one"), KnownModel("two"))
    for wanted in (
        lambda: model_wanted(name, Context(known, "r", "", "", Limits())),
        lambda: model_fields.model_wanted(name, known),
    ):
        with pytest.raises(InvalidRequest, match=r"`model` is missing.*`one`, `two`") as caught:
            wanted()
        assert caught.value.param == "model"


# ---- no content ------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["user", "system", "assistant"])
@pytest.mark.parametrize("route", [CHAT, MESSAGES, RESPONSES])
async def test_empty_content_list_is_accepted_for_assistants_only(
    client: httpx.AsyncClient, route: str, role: str
) -> None:
    field = "input" if route == RESPONSES else "messages"
    turns = [user("a"), {"role": role, "content": []}, user("b")]
    answer = await client.post(route, json=body(route) | {field: turns})
    if role == "assistant":
        assert answer.status_code == 200, answer.text
    else:
        assert error_of(answer)["param"] == f"{field}[1].content"


# ---- lone surrogates -------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    ['{"x": "\\ud800"}', '{"\\udc00": 1}', {"x": ["\ud800"]}, '{"x": 1e999}'],
    ids=["value", "name", "object", "number"],
)
@pytest.mark.parametrize("route", [CHAT, OLLAMA])
async def test_non_object_arguments_in_history_are_refused_by_name(
    client: httpx.AsyncClient, engine: ScriptedEngine, route: str, arguments: Any
) -> None:
    history = [user("hi"), assistant(called("1", "f", arguments)), result("1", "x")]
    error = error_of(await send(client, route, messages=history))
    param = "messages[1].tool_calls[0].function.arguments"
    assert param in error if route == OLLAMA else error["param"] == param
    assert engine.submitted == []


@pytest.mark.parametrize("route", [CHAT, OLLAMA])
async def test_history_call_may_have_no_arguments(
    client: httpx.AsyncClient, engine: ScriptedEngine, route: str
) -> None:
    for arguments in (None, "", {}):
        history = [user("hi"), assistant(called("1", "f", arguments)), result("1", "x")]
        answer = await send(client, route, messages=history)
        assert answer.status_code == 200, answer.text
        (call,) = engine.submitted[-1].messages[1].tool_calls
        assert call.arguments == "{}"


async def test_lone_surrogates_in_inputs_of_anthropics_calls_are_refused(
    client: httpx.AsyncClient,
) -> None:
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"x": "\ud800"}}
    history = [user("hi"), {"role": "assistant", "content": [call]}, user("so?")]
    error = error_of(await send(client, MESSAGES, messages=history))
    assert error["param"] == "messages[1].content[0].input"


ROUTES = [CHAT, COMPLETIONS, MESSAGES, OLLAMA, GENERATE, RESPONSES, "/v1/tokenize"]


@pytest.mark.parametrize("route", [*ROUTES, "/api/show"])
async def test_lone_surrogate_in_model_name_is_refused(connect: Connect, route: str) -> None:
    client = connect(Settings(model=ModelSettings(aliases=("gpt-*",))))
    answer = await send(client, route, model="gpt-\ud800")
    assert answer.status_code == 400, answer.text
    assert "`model` contains a lone surrogate" in answer.text


async def test_lone_surrogates_in_arguments_of_items_are_refused(client: httpx.AsyncClient) -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": "\\ud800"}'}
    error = error_of(await send(client, RESPONSES, input=[user("hi"), call, user("so?")]))
    assert error["param"] == "input[1].arguments"


# ---- fields that ask for nothing ------------------------------------------------------


@pytest.mark.parametrize("route", [*ROUTES, "/api/v0/chat/completions", "/v1/detokenize"])
async def test_null_fields_count_as_absent(client: httpx.AsyncClient, route: str) -> None:
    odd = dict.fromkeys(("seed", "stop", "transforms", "best_of", "functions", "made_up"))
    request = {"tokens": [1]} if route == "/v1/detokenize" else body(route)
    answer = await client.post(route, json={**request, **odd})
    assert answer.status_code == 200, answer.text
    assert "x-vlm-ignored" not in answer.headers
    if route not in (MESSAGES, OLLAMA, GENERATE):
        answer = await client.post(route, json={**request, "made_up": 1})
        assert error_of(answer)["param"] == "made_up"


# ---- streams that are silent -----------------------------------------------------------


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, MESSAGES, OLLAMA, GENERATE, RESPONSES])
async def test_silent_stream_of_every_dialect_has_keep_alives(
    connect: Connect, engine: ScriptedEngine, route: str
) -> None:
    client = connect(Settings(server=Server(stream_keepalive_seconds=0.02)))
    engine.script = (says("One"), prefill := asyncio.Event(), ends_with(" two."), finished())
    asyncio.get_running_loop().call_later(0.3, prefill.set)
    answer = await send(client, route, stream=True)
    before, _, after = answer.text.partition(" two.")
    pause = before[before.index("One") :]
    assert sum(pause.count(sign) for sign in SIGNS_OF_LIFE) >= 3, pause
    assert after, "it goes on"


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, MESSAGES, OLLAMA, GENERATE, RESPONSES])
@pytest.mark.parametrize("is_set", [False, True])
async def test_empty_chunk_keepalives_satisfy_strict_readers(
    connect: Connect, engine: ScriptedEngine, route: str, is_set: bool
) -> None:
    """Strict readers fail at an SSE block without data, wherever it stands in the stream."""
    mode = "empty_chunk" if is_set else "comment"
    client = connect(Settings(server=Server(stream_keepalive_seconds=0.02, stream_keepalive=mode)))
    if not is_set:
        client.headers["x-vlm-keepalive"] = "empty_chunk"
    pauses = [asyncio.Event() for _ in range(3)]
    engine.script = (pauses[0], says("One"), pauses[1], ends_with(" two."), pauses[2], finished())
    asking = asyncio.create_task(send(client, route, stream=True))
    for pause in pauses:
        await engine.waiting.wait()
        engine.waiting.clear()
        await asyncio.sleep(0.1)
        pause.set()
    answer = await asking
    if route not in (OLLAMA, GENERATE):
        blocks = answer.text.removesuffix("\n\n").split("\n\n")
        assert all(re.fullmatch(r"(event: [\w.]+\n)?data: .+", block) for block in blocks)
    events = [event for event in data(answer) if event.get("type") != "ping"]
    numbers = [event["sequence_number"] for event in events if "sequence_number" in event]
    assert numbers == sorted(set(numbers))
    client.headers["x-vlm-keepalive"] = "off"
    plain = await send(client, route, stream=True)
    assert text_of_stream(data(answer)) == text_of_stream(data(plain)) == "One two."
    assert len(data(answer)) > len(data(plain)), "there were signs of life"


async def test_unknown_keepalive_header_is_refused(client: httpx.AsyncClient) -> None:
    client.headers["x-vlm-keepalive"] = "chunk"
    answer = await send(client, CHAT, stream=True)
    assert "comment, empty_chunk, off" in error_of(answer)["message"]


def text_of_stream(events: list[dict[str, Any]]) -> str:
    """The text that a reader of any dialect accumulates."""
    texts = []
    for event in events:
        choices = event.get("choices") or [{}]
        delta = event.get("delta", {})
        texts += [
            choices[0].get("text"),
            choices[0].get("delta", {}).get("content"),
            delta if isinstance(delta, str) else delta.get("text"),
            event.get("message", {}).get("content") if "done" in event else None,
            event.get("response") if "done" in event else None,
        ]
    return "".join(text for text in texts if isinstance(text, str))


SIGNS_OF_LIFE = (
    ": keep-alive\n\n",
    "event: ping\n",
    '"message":{"role":"assistant","content":""},"done":false}\n',
    '"response":"","done":false}\n',
)


# ---- streams that fail -----------------------------------------------------------------


def data(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, in order."""
    lines = answer.text.splitlines()
    found = (line.removeprefix("data: ") for line in lines)
    return [json.loads(entry) for entry in found if entry.startswith("{")]


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, MESSAGES, OLLAMA, GENERATE, RESPONSES])
async def test_failed_stream_keeps_its_text_before_error(
    client: httpx.AsyncClient, engine: ScriptedEngine, route: str
) -> None:
    engine.script = (says("One, "), ends_with("two."), failed("engine_died", "It died."))
    answer = await send(client, route, stream=True)
    assert answer.status_code == 200
    assert "two." in answer.text
    *events, error = data(answer)
    assert "error" in error
    assert not any("error" in event for event in events)


async def test_events_before_stream_error_are_in_order(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (thinks("Hm."), ends_with("two."), failed("engine_died", "It died."))
    kinds = [event["type"] for event in data(await send(client, MESSAGES, stream=True))]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    thought = [*block[:2], "content_block_delta", block[2]]  # and its signature
    assert kinds == ["message_start", *thought, *block, "error"]


# ---- ignored fields --------------------------------------------------------------------

HOSTILE = ("a\r\nSet-Cookie: b", "na\u00efve \u2603", "\ud800", "x" * 10_000, *"abcdefgh" * 20)


async def test_hostile_names_are_escaped_in_headers(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        access_log.entry_of(scope).ignored = HOSTILE
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    transport = httpx.ASGITransport(RequestLog(app, AnsweredRequests(), EndedRequests(()), None))
    async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
        with caplog.at_level(logging.INFO, "vlm_server.api"):
            answer = await client.get("/")
    names = answer.headers["x-vlm-ignored"].split(", ")
    assert "set-cookie" not in answer.headers
    assert len(names) == MAX_NAMES
    assert names[:3] == ["a??Set-Cookie??b", "na?ve??", "?"]
    assert max(map(len, names)) == 256
    assert "ignored=a??Set-Cookie??b,na?ve??,?," in caplog.text


@pytest.mark.parametrize(
    "route", ["/v1/completions", "/v1/tokenize", "/v1/detokenize", CHAT, RESPONSES]
)
async def test_unknown_fields_follow_setting(connect: Connect, route: str) -> None:
    own = {"tokens": [1], "prompt": ..., "messages": ...} if "detokenize" in route else {}
    request = {"prompt": "hi"} if route == "/v1/tokenize" else body(route)
    request = {name: value for name, value in {**request, **own}.items() if value is not ...}
    refused = await connect().post(route, json={**request, "colour": 1})
    assert refused.json()["error"]["param"] == "colour"
    client = connect(Settings(server=Server(unknown_fields="ignore")))
    answer = await client.post(route, json={**request, "colour": 1})
    assert (answer.status_code, answer.headers.get("x-vlm-ignored")) == (200, "colour")


# ---- fields that exclude each other ----------------------------------------------------


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (CHAT, {"response_format": JSON_SCHEMA}, "continue_final_message"),
        (CHAT, {"tools": [tool()], "tool_choice": "required"}, "continue_final_message"),
        (MESSAGES, {"output_config": ANTHROPIC_SCHEMA}, "messages"),
        (MESSAGES, {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any"}}, "messages"),
        (OLLAMA, {"format": SCHEMA}, "messages"),
        (OLLAMA, {"format": "json"}, "messages"),
    ],
)
async def test_continued_answer_cannot_have_grammar(
    client: httpx.AsyncClient, route: str, fields: dict[str, Any], param: str
) -> None:
    begun = {"messages": BEGUN} | ({"continue_final_message": True} if route == CHAT else {})
    assert (await send(client, route, **begun)).status_code == 200
    error = error_of(await send(client, route, **begun, **fields))
    assert f"`{param}`" in error if route == OLLAMA else error["param"] == param


@pytest.mark.parametrize(
    ("route", "fields", "named"),
    [
        (
            CHAT,
            {"tools": [tool()], "tool_choice": "required", "response_format": JSON_SCHEMA},
            "response_format",
        ),
        (
            MESSAGES,
            {
                "tools": [ANTHROPIC_TOOL],
                "tool_choice": {"type": "any"},
                "output_config": ANTHROPIC_SCHEMA,
            },
            "output_config.format",
        ),
    ],
)
async def test_required_calls_drop_schema_in_every_dialect(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    route: str,
    fields: dict[str, Any],
    named: str,
) -> None:
    answer = await send(client, route, **fields)
    assert (answer.status_code, answer.headers["x-vlm-ignored"]) == (200, named)
    assert engine.submitted[0].sampling.json_schema is None
    assert engine.submitted[0].tools is not None


# ---- thoughts --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["enabled", "disabled", "adaptive"])
@pytest.mark.parametrize("budget", [None, 0, 50])
async def test_reasoning_fields_are_equivalent_in_every_dialect(
    client: httpx.AsyncClient, engine: ScriptedEngine, kind: str, budget: int | None
) -> None:
    wanted = {"type": kind} if budget is None or kind == "disabled" else {
        "type": kind, "budget_tokens": budget
    }  # fmt: skip
    for route in (CHAT, MESSAGES, RESPONSES):
        assert (await send(client, route, thinking=wanted)).status_code == 200
    first, *rest = engine.submitted
    assert [submit.template for submit in rest] == [first.template] * 2
    assert first.template.enable_thinking == {"enabled": True, "disabled": False}.get(kind)
    found = {submit.sampling.max_reasoning_tokens for submit in (first, *rest)}
    assert found == {wanted.get("budget_tokens")}


@dataclass(frozen=True)
class Thought:
    """The reasoning options the engine gets."""

    enabled: bool | None
    budget: int | None
    variables: str

    @classmethod
    def of(cls, submit: Submit) -> Thought:
        template = submit.template
        budget = submit.sampling.max_reasoning_tokens
        return cls(template.enable_thinking, budget, template.variables)


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
async def test_reasoning_effort_is_equivalent_in_every_dialect(
    client: httpx.AsyncClient, engine: ScriptedEngine, effort: str
) -> None:
    await send(client, CHAT, reasoning_effort=effort)
    await send(client, RESPONSES, reasoning={"effort": effort})
    await send(client, MESSAGES, output_config={"effort": effort})
    await send(client, MESSAGES, output_config={"effort": effort}, thinking={"type": "adaptive"})
    if effort in ("low", "medium", "high"):
        await send(client, OLLAMA, think=effort)
    first, *rest = map(Thought.of, engine.submitted)
    assert first.enabled is (effort != "none")
    assert {first, *rest} == {first}
    assert len(rest) >= 3


async def test_disabled_reasoning_has_no_effort(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    off = {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}
    answer = await send(client, MESSAGES, **off)
    assert answer.headers["x-vlm-ignored"] == "output_config.effort"
    assert Thought.of(engine.submitted[0]) == Thought(False, None, "{}")


THINKING: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
    (CHAT, {"thinking": {"type": "enabled"}}, "thinking"),
    (CHAT, {"reasoning": {"max_tokens": 5}}, "reasoning"),
    (MESSAGES, {"thinking": {"type": "adaptive"}}, "thinking"),
    (MESSAGES, {"output_config": {"effort": "low"}}, "output_config.effort"),
    (OLLAMA, {"think": True}, "think"),
    (GENERATE, {"think": "low"}, "think"),
    (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning"),
    (RESPONSES, {"thinking": {"type": "enabled"}}, "thinking"),
]


@pytest.mark.parametrize(("route", "fields", "named"), THINKING)
async def test_model_without_reasoning_reports_reasoning_fields(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    route: str,
    fields: dict[str, Any],
    named: str,
) -> None:
    thinker = ModelFacts(family="qwen3_vl", capabilities=("thinking",))
    found = []
    for facts in (ModelFacts(), thinker, ModelFacts(family="qwen2_5_vl")):
        engine.status = replace(engine.status, model_facts=facts)
        answer = await send(client, route, **fields)
        assert answer.status_code == 200
        found.append(answer.headers.get("x-vlm-ignored"))
    assert found == [None, None, named]


# ---- histories that were cut off -------------------------------------------------------


async def test_every_dialect_accepts_result_without_its_call(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    block = {"type": "tool_result", "tool_use_id": "lost", "content": "x"}
    for answer in (
        await client.post(CHAT, json=chat(user("hi"), result("lost", "x"))),
        await send(client, MESSAGES, messages=[user("hi"), user(block)]),
        await send(
            client,
            OLLAMA,
            messages=[user("hi"), {"role": "tool", "tool_call_id": "lost", "content": "x"}],
        ),
    ):
        assert answer.status_code == 200, answer.text
    found = [submit.messages[1] for submit in engine.submitted]
    assert [(message.role, message.tool_call_id, message.name) for message in found] == [
        ("tool", "lost", "")
    ] * 3
