"""Each field of a request changes something, is refused by name, or is reported as ignored."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx
import pytest

from tests.support import video_files
from tests.unit.api.conftest import Connect
from tests.unit.api.dialects.responses.requests import ROUTE, asking, tool
from tests.unit.api.requests import PNG_URL, user
from tests.unit.api.scripted_engine import ScriptedEngine, calls, ended, finished, scored
from vlm_server.protocol import (
    ImagePart,
    Message,
    SamplingParams,
    TemplateOptions,
    TextPart,
    TokenLogprob,
    TokenText,
    ToolCall,
    VideoPart,
)
from vlm_server.settings import Limits, Server, Settings

SCHEMA: Any = {"type": "object", "properties": {"b": {}, "a": {}}}
FORMAT = {"type": "json_schema", "name": "x", "schema": SCHEMA}


async def send(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post(ROUTE, json=body)
    assert answer.status_code == 200, answer.text
    decoded: dict[str, Any] = answer.json()
    return decoded


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_output_tokens": 5}, {"max_tokens": 5}),
        ({"temperature": 0.5}, {"temperature": 0.5}),
        ({"top_p": 0.25}, {"top_p": 0.25}),
        ({"presence_penalty": 1}, {"presence_penalty": 1.0}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"frequency_penalty": -1}, {"frequency_penalty": -1.0}),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": 0}),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 3}, {"logprobs": 3}),
        ({"text": {"format": {"type": "text"}}}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"json_schema": '{"type":"object"}'}),
        (
            {"text": {"format": FORMAT}},
            {"json_schema": json.dumps(SCHEMA, separators=(",", ":"))},
        ),
        ({"reasoning": {"max_tokens": 9}}, {"max_reasoning_tokens": 9}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 8}},
            {"max_reasoning_tokens": 8},
        ),
    ],
)
async def test_responses_sampling_fields_reach_engine(
    client: httpx.AsyncClient, engine: ScriptedEngine, fields: Any, expected: Any
) -> None:
    await send(client, asking(**fields))
    defaults = {"max_tokens": Limits().default_max_tokens}
    assert engine.submitted[0].sampling == SamplingParams(**defaults | expected)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, TemplateOptions()),
        ({"reasoning": {"effort": "none"}}, TemplateOptions(enable_thinking=False)),
        (
            {"reasoning": {"effort": "low"}},
            TemplateOptions(True, '{"reasoning_effort":"low"}'),
        ),
        ({"thinking": {"type": "disabled"}}, TemplateOptions(enable_thinking=False)),
        ({"thinking": {"type": "enabled"}}, TemplateOptions(enable_thinking=True)),
        ({"thinking": {"type": "auto"}}, TemplateOptions()),
        ({"thinking": {"type": "adaptive"}}, TemplateOptions()),
        (
            {"thinking": {"type": "auto"}, "reasoning": {"effort": "none"}},
            TemplateOptions(enable_thinking=False),
        ),
    ],
)
async def test_responses_reasoning_fields_reach_template(
    client: httpx.AsyncClient, engine: ScriptedEngine, fields: Any, expected: TemplateOptions
) -> None:
    await send(client, asking(**fields))
    assert engine.submitted[0].template == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("auto", (), True)),
        ({"tool_choice": "auto"}, ("auto", (), True)),
        ({"tool_choice": "required"}, ("required", (), True)),
        ({"parallel_tool_calls": False}, ("auto", (), False)),
        ({"tool_choice": {"type": "function", "name": "b"}}, ("required", ("b",), False)),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "a"}],
                }
            },
            ("required", ("a",), True),
        ),
    ],
)
async def test_responses_tool_choice_reaches_engine(
    client: httpx.AsyncClient, engine: ScriptedEngine, fields: Any, expected: Any
) -> None:
    answer = await send(client, asking(tools=[tool("a"), tool("b", strict=True)], **fields))
    tools = engine.submitted[0].tools
    assert tools is not None
    assert (tools.choice, tools.allowed, tools.parallel) == expected
    assert tools.strict == ("b",)
    assert answer["tool_choice"] == fields.get("tool_choice", "auto")
    assert [each["strict"] for each in answer["tools"]] == [False, True]


async def test_responses_choice_none_offers_no_tools(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    await send(client, asking(tools=[tool("a")], tool_choice="none"))
    assert engine.submitted[0].tools is None


async def test_response_text_has_log_probabilities(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    entry = TokenLogprob(TokenText("Hi", -0.25), (TokenText("Hi", -0.25), TokenText("Yo", -2.0)))
    engine.script = (scored("Hi", entry), ended(), finished())
    wanted: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = await send(client, asking(**wanted))
    (shown,) = answer["output"][0]["content"][0]["logprobs"]
    assert (shown["token"], shown["logprob"], shown["bytes"]) == ("Hi", -0.25, [72, 105])
    assert [top["token"] for top in shown["top_logprobs"]] == ["Hi", "Yo"]


ECHOED = {
    "instructions": "Rhyme.",
    "max_output_tokens": 9,
    "metadata": {"k": "v"},
    "parallel_tool_calls": False,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "temperature": 0.5,
    "top_p": 0.75,
    "max_tool_calls": 3,
    "prompt_cache_key": "p",
    "safety_identifier": "s",
    "user": "u",
    "store": False,
}


@pytest.mark.parametrize("name", sorted(ECHOED))
async def test_response_repeats_requests_fields(client: httpx.AsyncClient, name: str) -> None:
    assert (await send(client, asking(**{name: ECHOED[name]})))[name] == ECHOED[name]


async def test_response_repeats_its_format(client: httpx.AsyncClient) -> None:
    answer = await send(client, asking(text={"format": FORMAT}, reasoning={"effort": "low"}))
    assert answer["text"]["format"] == {**FORMAT, "description": None, "strict": False}
    assert answer["reasoning"] == {"effort": "low", "summary": None}


# ---- items -----------------------------------------------------------------------------


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": content, **fields}


def call(call_id: str, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "a", "arguments": arguments}


def result(call_id: str, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def thought(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content}


INPUT_TEXT = {"type": "input_text", "text": "R"}


def texts(*pieces: str) -> tuple[TextPart, ...]:
    return tuple(map(TextPart, pieces))


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([{"role": "system", "content": "S"}, user("U")], [Message("system", texts("S"))]),
        ([{"role": "developer", "content": "D"}, user("U")], [Message("system", texts("D"))]),
        ([assistant("A"), user("U")], [Message("assistant", texts("A"))]),
        (
            [assistant([{"type": "output_text", "text": "A", "annotations": []}]), user("U")],
            [Message("assistant", texts("A"))],
        ),
        (
            [assistant([{"type": "refusal", "refusal": "No."}]), user("U")],
            [Message("assistant", texts("No."))],
        ),
        (
            [thought("T"), assistant("A"), call("1"), call("2"), result("2", "R"), user("U")],
            [
                Message(
                    "assistant",
                    texts("A"),
                    "T",
                    (ToolCall("1", "a", "{}"), ToolCall("2", "a", "{}")),
                ),
                Message("tool", texts("R"), tool_call_id="2", name="a"),
            ],
        ),
        (
            [thought("T"), call("1", ""), result("1", [INPUT_TEXT]), user("U")],
            [
                Message("assistant", (), "T", (ToolCall("1", "a", "{}"),)),
                Message("tool", texts("R"), tool_call_id="1", name="a"),
            ],
        ),
        (
            [assistant("A", phase="commentary"), assistant("B", phase="final_answer"), user("U")],
            [Message("assistant", texts("A")), Message("assistant", texts("B"))],
        ),
        (
            [call("1", '{"x": '), call("2", "[]"), user("U")],
            [
                Message(
                    "assistant",
                    (),
                    tool_calls=(
                        ToolCall("1", "a", '{"arguments": "{\\"x\\": "}'),
                        ToolCall("2", "a", '{"arguments": "[]"}'),
                    ),
                )
            ],
        ),
        (
            [call("1"), result("1", "R"), thought("T"), thought("T"), assistant("A"), user("U")],
            [
                Message("assistant", (), "", (ToolCall("1", "a", "{}"),)),
                Message("tool", texts("R"), tool_call_id="1", name="a"),
                Message("assistant", texts("A"), "TT"),
            ],
        ),
    ],
)
async def test_input_items_become_messages(
    client: httpx.AsyncClient, engine: ScriptedEngine, items: Any, expected: list[Message]
) -> None:
    await send(client, asking(items))
    assert list(engine.submitted[0].messages) == [*expected, Message("user", texts("U"))]


async def test_messages_keep_path_of_their_input_item(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    items = [user("U"), thought("T"), call("1"), result("1", "R"), user("V")]
    await send(client, asking(items, instructions="I"))
    assert engine.params[0] == ("instructions", "input[0]", "input[1]", "input[3]", "input[4]")


async def test_incomplete_response_is_continued(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    await send(client, asking([user("U"), assistant("A", status="incomplete")]))
    assert engine.submitted[0].template.continue_final


async def test_input_video_reaches_engine(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    video = {
        "type": "input_video",
        "video_url": video_files.data_url(video_files.encode(video_files.noise(1, 3))),
    }
    await send(client, asking([user(video)]))
    assert engine.submitted[0].messages[0].content == (VideoPart(0),)


async def test_input_image_detail_sets_pixel_limit_and_grounding(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    for detail in ("low", "high", "auto", "original", None):
        part = {"type": "input_image", "image_url": PNG_URL, "detail": detail}
        await send(client, asking([user(part)]))
    images = [submit.images[0] for submit in engine.submitted]
    assert [image.max_side_pixels for image in images] == [512] + [None] * 4
    assert [image.for_grounding for image in images] == [False, True, False, True, False]
    assert engine.submitted[0].messages[0].content == (ImagePart(0),)


@pytest.mark.parametrize("kind", ["input_audio", "made_up"])
async def test_unknown_input_part_is_refused_with_known_types(
    client: httpx.AsyncClient, kind: str
) -> None:
    answer = await client.post(ROUTE, json=asking([user({"type": kind})]))
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert all(
        f"'{kind_name}'" in message
        for kind_name in ("input_text", "input_image", "input_video", "input_file")
    )


async def test_codex_namespaced_tools_reach_engine(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (calls(0, "{}", id="call_a", name="look"), ended("tool_calls"), finished())
    namespace = {"type": "namespace", "name": "mcp__eyes", "tools": [tool("look"), tool("blink")]}
    tools = [tool("shell"), namespace, {"type": "web_search", "external_web_access": True}]
    answer = await client.post(ROUTE, json=asking(tools=tools))
    assert answer.status_code == 200, answer.text
    offered = engine.submitted[0].tools
    assert offered is not None
    functions = [function["function"] for function in json.loads(offered.definitions)]
    assert [function["name"] for function in functions] == ["shell", "look", "blink"]
    assert all("namespace" not in function for function in functions)
    assert answer.headers["x-vlm-ignored"] == "tools[].namespace, tools[].web_search"
    (returned_call,) = answer.json()["output"]
    assert (returned_call["name"], returned_call["namespace"]) == ("look", "mcp__eyes")


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"tools": []}, "tools[0].name"),
        ({"name": "n"}, "tools[0].tools"),
        ({"name": "n", "tools": [{"type": "custom"}]}, "tools[0].tools[0].type"),
        ({"name": "n", "tools": [tool("a"), "b"]}, "tools[0].tools[1].type"),
    ],
)
async def test_wrong_tool_namespace_is_refused_by_name(
    client: httpx.AsyncClient, wrong: dict[str, Any], param: str
) -> None:
    answer = await client.post(ROUTE, json=asking(tools=[{"type": "namespace", **wrong}]))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


# ---- refused and ignored fields --------------------------------------------------------

AUDIO = {"type": "input_audio"}
HOSTED = {"type": "file_search"}


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (asking(background=True, store=False), "background", "invalid_value"),
        (asking([user(AUDIO)]), "input[0].content[0]", "unsupported_parameter"),
        (asking([user("U"), result("1", [AUDIO])]), "input[1].output[0]", "unsupported_parameter"),
        (asking([{"type": "mcp_call", "id": "i"}]), "input[0]", "unsupported_parameter"),
        (asking([{"type": "item_reference"}]), "input[0].id", "invalid_value"),
        (asking([{"type": "made_up"}]), "input[0].type", "invalid_value"),
        (asking([user({"type": "made_up"})]), "input[0].content[0].type", "invalid_value"),
        (asking(tools=[HOSTED]), "tools[0].type", "unsupported_parameter"),
        (asking(tools=[{"name": "a"}]), "tools[0].type", "invalid_value"),
        (asking(tools=[tool("a"), tool("a")]), "tools[1]", "invalid_value"),
        (asking(tool_choice=HOSTED), "tool_choice.type", "unsupported_parameter"),
        (asking(tool_choice="required"), "tool_choice", "invalid_value"),
        (asking(tool_choice={"type": "function", "name": "x"}), "tool_choice", "invalid_value"),
        (asking([]), "input", "invalid_value"),
        (asking([assistant("A")]), "input", "invalid_value"),
        (asking([user("U"), assistant("A")]), "input", "invalid_value"),
        (asking([user("U"), call("1")]), "input", "invalid_value"),
        (asking([user("U"), call("1", "\ud800")]), "input[1].arguments", "invalid_value"),
        (
            asking(reasoning={"effort": "none"}, thinking={"type": "enabled"}),
            "reasoning.effort",
            "invalid_value",
        ),
        (
            asking(reasoning={"effort": "low"}, thinking={"type": "disabled"}),
            "reasoning.effort",
            "invalid_value",
        ),
        (
            asking([user("U"), assistant("A", status="incomplete")], text={"format": FORMAT}),
            "input[1].status",
            "invalid_value",
        ),
        (
            asking(
                [user("U"), assistant("A", status="incomplete")],
                tools=[tool("a")],
                tool_choice="required",
            ),
            "input[1].status",
            "invalid_value",
        ),
        (
            asking([user({"type": "input_image", "image_url": "x", "file_id": "f"})]),
            "input[0].content[0].image_url",
            "invalid_value",
        ),
        (
            asking([user({"type": "input_image", "image_url": "data:image/png;base64,AAAA"})]),
            "input[0].content[0]",
            "invalid_image",
        ),
        (
            asking([assistant([{"type": "input_image", "image_url": PNG_URL}]), user("U")]),
            "input[0].content[0]",
            "invalid_value",
        ),
        (asking(top_logprobs=2), "top_logprobs", "invalid_value"),
        (asking(include=["made.up"]), "include[0]", "invalid_value"),
        (asking(temperature=3), "temperature", "invalid_value"),
        (asking(reasoning={"effort": "hard"}), "reasoning.effort", "invalid_value"),
        (asking(metadata={"k" * 65: "v"}), "metadata", "invalid_value"),
        (asking(stream_options={}), "stream_options", "invalid_value"),
        (asking(ignore_eos=True, text={"format": FORMAT}), "ignore_eos", "invalid_value"),
        (
            asking(ignore_eos=True, tools=[tool("a")], tool_choice="required"),
            "ignore_eos",
            "invalid_value",
        ),
        (asking(instructions="\ud800"), "instructions", "invalid_value"),
        (asking(metadata={"k": "\ud800"}), None, "invalid_value"),
        (asking(previous_response_id="r"), "previous_response_id", "previous_response_not_found"),
        ({"model": "gpt-9", "input": "Hi"}, "model", "model_not_found"),
        ({"model": "demo"}, "input", "invalid_value"),
    ],
)
async def test_responses_refusals_name_field(
    client: httpx.AsyncClient, engine: ScriptedEngine, body: Any, param: str | None, code: str
) -> None:
    content = json.dumps(body)
    headers = {"Content-Type": "application/json"}
    answer = await client.post(ROUTE, content=content, headers=headers)
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error
    assert answer.status_code == (404 if code == "model_not_found" else 400)
    assert engine.submitted == []


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"user": "u", "service_tier": "auto", "truncation": "auto"}, None),
        ({"user": None, "truncation": None}, ""),
        ({"tools": [tool("a", defer_loading=True)]}, "tools[].defer_loading"),
        (
            {"input": [{**user("U"), "name": "me"}, {**user("U"), "name": "you"}]},
            "input[].name",
        ),
        (
            {"input": [user({"type": "input_text", "text": "U", "cache\r\nX": 1})]},
            "input[].content[].cache??X",
        ),
        ({"max_tool_calls": 0}, None),
        (
            {"tools": [tool("a")], "tool_choice": "required", "text": {"format": FORMAT}},
            "text.format",
        ),
    ],
)
async def test_fields_without_effect_of_response_are_reported(
    client: httpx.AsyncClient, fields: Any, ignored: str | None
) -> None:
    answer = await client.post(ROUTE, json={**asking(), **fields})
    assert answer.status_code == 200, answer.text
    expected = ", ".join(sorted(fields)) if ignored is None else ignored
    assert answer.headers.get("x-vlm-ignored", "") == expected


NAMES = ("x\r\nSet-Cookie: a=b", "na\xefve\u2603", "y" * 300)


@pytest.mark.parametrize(
    ("place", "name"),
    [("", "\ud800"), *itertools.product(("", "reasoning", "text", "input"), NAMES)],
)
async def test_ignored_field_names_are_printable_in_header(
    connect: Connect, place: str, name: str
) -> None:
    client = connect(Settings(server=Server(unknown_fields="ignore")))
    odd = {name: 1}
    fields = {place: [user("U") | odd] if place == "input" else odd} if place else odd
    content = json.dumps(asking() | fields)
    headers = {"Content-Type": "application/json"}
    answer = await client.post(ROUTE, content=content, headers=headers)
    assert answer.status_code == 200, answer.text
    shown = answer.headers["x-vlm-ignored"]
    assert shown.isascii()
    assert shown.isprintable()
    assert len(shown) < 100


async def test_responses_required_calls_have_no_schema(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    await send(client, asking(tools=[tool("a")], tool_choice="required", text={"format": FORMAT}))
    assert engine.submitted[0].sampling.json_schema is None


async def test_ignored_url_parameters_are_reported(client: httpx.AsyncClient) -> None:
    stored = await send(client, asking())
    route = f"{ROUTE}/{stored['id']}"
    for path, query, named in (
        (route, "stream=false", None),
        (route, "include=reasoning.encrypted_content", "include"),
        (f"{route}/input_items", "limit=5&order=asc", None),
        (f"{route}/input_items", "limit=5&include=x&before=y", "include, before"),
    ):
        answer = await client.get(f"{path}?{query}")
        assert (answer.status_code, answer.headers.get("x-vlm-ignored")) == (200, named)
