"""Every field of a chat completion reaches the engine, or is refused by name."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from msgspec import structs

from tests.unit.api.conftest import Connect
from tests.unit.api.requests import PNG_URL, ROUTE, chat, user
from tests.unit.api.scripted_engine import ScriptedEngine
from vlm_server.api.dialects.openai.schema import HARMLESS, NEUTRAL, ChatRequest
from vlm_server.api.parsing.ignored_fields import MAX_NAMES
from vlm_server.protocol import SamplingParams
from vlm_server.settings import Limits, ModelSettings, Server, Settings

LONGEST = Limits().default_max_tokens
OPTIONAL = [f.name for f in structs.fields(ChatRequest) if f.name != "messages"]


NO_TOKEN_IDS = [
    "",
    "-1",
    "-0",
    "+1",
    "05",
    "1.0",
    "1e3",
    " 1",
    "1\n",
    "1_0",
    "x",
    "٣",
    "\0",
    "9" * 11,
]


async def refusal(client: httpx.AsyncClient, body: dict[str, Any] | bytes) -> dict[str, Any]:
    """The error answered to `body`; must be a well-formed 400."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await client.post(ROUTE, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 300
    return error


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({}, SamplingParams(LONGEST)),
        ({"max_tokens": 5}, SamplingParams(max_tokens=5)),
        ({"max_tokens": -1}, SamplingParams(LONGEST)),
        ({"max_completion_tokens": -1}, SamplingParams(LONGEST)),
        ({"max_completion_tokens": 6}, SamplingParams(max_tokens=6)),
        ({"max_tokens": 7, "max_completion_tokens": 7}, SamplingParams(max_tokens=7)),
        ({"temperature": 0}, SamplingParams(LONGEST, temperature=0.0)),
        ({"temperature": 2.0}, SamplingParams(LONGEST, temperature=2.0)),
        ({"top_p": 1}, SamplingParams(LONGEST, top_p=1.0)),
        ({"top_p": 0.01}, SamplingParams(LONGEST, top_p=0.01)),
        ({"seed": 0}, SamplingParams(LONGEST, seed=0)),
        ({"seed": 2**63 - 1}, SamplingParams(LONGEST, seed=2**63 - 1)),
        ({"seed": -(2**63)}, SamplingParams(LONGEST, seed=-(2**63))),
        ({"stop": "END"}, SamplingParams(LONGEST, stop=("END",))),
        ({"stop": ["a", "é\n"]}, SamplingParams(LONGEST, stop=("a", "é\n"))),
        ({"stop": []}, SamplingParams(LONGEST)),
        ({"presence_penalty": -2}, SamplingParams(LONGEST, presence_penalty=-2.0)),
        ({"frequency_penalty": 2.0}, SamplingParams(LONGEST, frequency_penalty=2.0)),
        ({"repetition_penalty": 1e-30}, SamplingParams(LONGEST, repetition_penalty=1e-30)),
        ({"repetition_penalty": 2}, SamplingParams(LONGEST, repetition_penalty=2.0)),
        ({"logit_bias": {}}, SamplingParams(LONGEST)),
        (
            {"logit_bias": {"0": -100, "50256": 99.5, "9999999999": 0}},
            SamplingParams(LONGEST, logit_bias={0: -100.0, 50256: 99.5, 9999999999: 0.0}),
        ),
        ({"logprobs": False, "top_logprobs": 0}, SamplingParams(LONGEST)),
        ({"top_logprobs": 0}, SamplingParams(LONGEST)),
        ({"logprobs": True}, SamplingParams(LONGEST, logprobs=0)),
        ({"logprobs": True, "top_logprobs": 20}, SamplingParams(LONGEST, logprobs=20)),
        ({"top_k": 0}, SamplingParams(LONGEST, top_k=0)),
        ({"top_k": -1}, SamplingParams(LONGEST, top_k=0)),
        ({"top_k": 2**31 - 1}, SamplingParams(LONGEST, top_k=2**31 - 1)),
        ({"min_p": 0}, SamplingParams(LONGEST, min_p=0.0)),
        ({"min_p": 1}, SamplingParams(LONGEST, min_p=1.0)),
        ({"min_tokens": 0}, SamplingParams(LONGEST)),
        ({"min_tokens": 5}, SamplingParams(LONGEST, min_tokens=5)),
        ({"min_tokens": 5, "max_tokens": 5}, SamplingParams(max_tokens=5, min_tokens=5)),
        ({"ignore_eos": True}, SamplingParams(LONGEST, ignore_eos=True)),
        ({"ignore_eos": False}, SamplingParams(LONGEST)),
        ({"n": 1}, SamplingParams(LONGEST)),
        (dict.fromkeys(OPTIONAL), SamplingParams(LONGEST)),
    ],
)
async def test_chat_fields_reach_engine(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    fields: dict[str, Any],
    sampling: SamplingParams,
) -> None:
    answer = await client.post(ROUTE, json=chat(**fields))
    assert answer.status_code == 200, answer.text
    assert engine.submitted[0].sampling == sampling


@pytest.mark.parametrize(
    ("param", "values"),
    [
        ("max_tokens", [0, -2, -1.5, 1.5, True, "5", 2**31, 2**63, 10**400, [], {}]),
        ("max_completion_tokens", [0, "5", 2**63]),
        ("temperature", [-0.1, 2.1, True, "NaN", "1", [], 10**400]),
        ("top_p", [0, -1, 1.01, False, "1"]),
        ("seed", [2**63, -(2**63) - 1, 1.5, True, "1"]),
        ("stop", [1, True, "", {}, ["a"] * 17, ["a"] * 10_000, "x" * 257]),
        ("stop[1]", [["a", ""], ["a", 1], ["a", None], ["a", "x" * 257]]),
        ("stop", ["\ud800", ["\udfff"]]),
        ("presence_penalty", [-2.1, 2.1, True, "1", "NaN", [], 10**400]),
        ("frequency_penalty", [-2.1, 2.1, False, "1", [], 10**400]),
        ("repetition_penalty", [0, -1, 2.1, True, "1", []]),
        ("logit_bias", [[], 5, "x", True, [["5", 1]]]),
        ("logit_bias", [{"5": value} for value in (-101, 100.5, True, "1", None, {}, 10**400)]),
        ("logit_bias", [{name: 1} for name in NO_TOKEN_IDS]),
        ("logit_bias", [{str(i): 1 for i in range(1025)}]),
        ("logprobs", [1, 0, "true", 5, []]),
        ("top_logprobs", [-1, 21, 1.5, True, "1", 5]),
        ("top_k", [-2, 1.5, True, "1", 2**31, 10**400]),
        ("min_p", [-0.1, 1.1, True, "0", []]),
        ("min_tokens", [-1, 1.5, True, "1", 2**31]),
        ("ignore_eos", [1, 0, "true"]),
        ("n", [0, -1, 9, 1.5, True, "1", [], 2**63, 10**400]),
        ("stream", [1, "true"]),
        ("stream_options", [True, []]),
        ("stream_options.include_usage", [{"include_usage": 1}]),
        ("stream_options", [{"include_usage": True}]),
        ("tools", [5, {}, "x"]),
        ("tools[0]", [[5], ["x"], [None]]),
        ("tools[0].type", [[{"type": "custom"}], [{"type": 5}]]),
        ("tools[0].function", [[{"type": "function"}], [{"type": "function", "function": "f"}]]),
        ("tool_choice", [5, [], "any", "", True]),
        ("tool_choice", ["required", {"type": "function", "function": {"name": "f"}}]),
        ("tool_choice.type", [{}, {"type": "custom"}]),
        ("parallel_tool_calls", [1, "true", []]),
        ("reasoning_effort", ["huge", 5, True, []]),
        ("thinking", ["enabled", True, []]),
        ("thinking.type", [{}, {"type": "on"}]),
        ("thinking.budget_tokens", [{"type": "enabled", "budget_tokens": -1}]),
        ("reasoning", ["high", 5]),
        ("reasoning.effort", [{"effort": "huge"}]),
        ("chat_template_kwargs", ["x", [], {"a": "x" * 20_000}]),
        ("chat_template_kwargs.enable_thinking", [{"enable_thinking": "yes"}]),
        ("continue_final_message", [1, "true", True]),
        ("add_generation_prompt", [1, "false"]),
        ("model", [1, []]),
        ("messages", [None, [], {}, "hi"]),
    ],
)
async def test_bad_chat_values_are_refused(
    client: httpx.AsyncClient, engine: ScriptedEngine, param: str, values: list[Any]
) -> None:
    for value in values:
        error = await refusal(client, {**chat(), param.partition("[")[0].partition(".")[0]: value})
        assert error["param"] == param, error
        assert error["code"] == "invalid_value"
    assert engine.submitted == []


async def test_default_max_tokens_comes_from_settings(
    connect: Connect, engine: ScriptedEngine
) -> None:
    for longest, expected in ((7, 7), (0, None)):
        client = connect(Settings(limits=Limits(default_max_tokens=longest)))
        await client.post(ROUTE, json=chat())
        assert engine.submitted[-1].sampling.max_tokens == expected
    await client.post(ROUTE, json=chat(min_tokens=9))
    assert engine.submitted[-1].sampling == SamplingParams(min_tokens=9)
    client = connect(Settings(limits=Limits(default_max_tokens=7)))
    await client.post(ROUTE, json=chat(min_tokens=9))
    assert engine.submitted[-1].sampling == SamplingParams(max_tokens=9, min_tokens=9)


async def test_two_different_max_tokens_are_refused(client: httpx.AsyncClient) -> None:
    error = await refusal(client, chat(max_tokens=5, max_completion_tokens=6))
    assert error["param"] == "max_tokens"


async def test_min_tokens_must_not_exceed_max_tokens(client: httpx.AsyncClient) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        error = await refusal(client, chat(min_tokens=6, **{name: 5}))
        assert (error["param"], error["code"]) == ("min_tokens", "invalid_value")


@pytest.mark.parametrize("fields", [{}, {"logprobs": False}, {"logprobs": None}])
async def test_top_logprobs_need_logprobs(
    client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    error = await refusal(client, chat(top_logprobs=1, **fields))
    assert (error["param"], error["code"]) == ("top_logprobs", "invalid_value")


async def test_number_of_stop_strings_is_limited(connect: Connect) -> None:
    client = connect(Settings(limits=Limits(max_stop_strings=1)))
    assert (await client.post(ROUTE, json=chat(stop=["a"]))).status_code == 200
    assert (await refusal(client, chat(stop=["a", "b"])))["param"] == "stop"


@pytest.mark.parametrize(
    "literal",
    ["NaN", "Infinity", "-Infinity", "1e309", "-1e309", "1e999999999", "9" * 5000, '"NaN"', "+1"],
)
async def test_numbers_beyond_json_are_refused(client: httpx.AsyncClient, literal: str) -> None:
    for field in (
        *("temperature", "top_p", "seed", "max_tokens", "n", "presence_penalty", "min_p", "top_k"),
        *("frequency_penalty", "repetition_penalty", "top_logprobs", "min_tokens", "logit_bias"),
    ):
        value = f'{{"5": {literal}}}' if field == "logit_bias" else literal
        body = json.dumps(chat(logprobs=True))[:-1] + f', "{field}": {value}}}'
        await refusal(client, body.encode())


@pytest.mark.parametrize("field", sorted(NEUTRAL))
async def test_neutral_values_are_accepted_and_others_refused(
    client: httpx.AsyncClient, field: str
) -> None:
    for value in NEUTRAL[field]:
        answer = await client.post(ROUTE, json=chat(**{field: value}))
        assert answer.status_code == 200, answer.text
    for value in ({"x": 1}, [{}], "weird", 0.5, -1):
        error = await refusal(client, chat(**{field: value}))
        assert (error["param"], error["code"]) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("store", 0),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("service_tier", "flex"),
    ],
)
async def test_almost_neutral_values_are_refused(
    client: httpx.AsyncClient, field: str, value: Any
) -> None:
    error = await refusal(client, chat(**{field: value}))
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


@pytest.mark.parametrize("field", sorted(HARMLESS))
async def test_fields_without_effect_accept_any_value(
    client: httpx.AsyncClient, field: str
) -> None:
    for value in (None, "x", {"a": "b"}):
        answer = await client.post(ROUTE, json=chat(**{field: value}))
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("x-vlm-ignored") == (None if value is None else field)


@pytest.mark.parametrize("field", ["best_of", "typical_p", "max_token", "Temperature", "", "a.b"])
async def test_unknown_fields_are_refused_by_name(client: httpx.AsyncClient, field: str) -> None:
    error = await refusal(client, chat(**{field: 1}))
    assert error["code"] == "unsupported_parameter"
    assert error["param"] == field


@pytest.mark.parametrize(
    ("fields", "near"),
    [
        ({"Temprature": 1}, "temperature"),
        ({"max_new_tokens": 5}, "max_tokens"),
        ({"stream_options": {"include_usge": True}}, "stream_options.include_usage"),
        ({"media_io_kwargs": {"video": {"num_frame": 3}}}, "media_io_kwargs.video.num_frames"),
        ({"zzz": 1}, ""),
        ({"zzz" * 300: 1}, ""),
    ],
)
async def test_refusal_of_unknown_field_names_nearest(
    client: httpx.AsyncClient, fields: dict[str, Any], near: str
) -> None:
    error = await refusal(client, chat(stream=True, **fields))
    assert error["code"] == "unsupported_parameter"
    end = f": did you mean `{near}`?" if near else " is not a field of this request."
    assert error["message"].endswith(end)


async def test_unknown_fields_are_ignored_and_named_if_configured(
    connect: Connect, engine: ScriptedEngine
) -> None:
    client = connect(Settings(server=Server(unknown_fields="ignore")))
    odd = {"best_of": 1, "a, b\n\u202e": 2, "nothing": None, "x" * 900: 3}
    answer = await client.post(ROUTE, json=chat(**odd, seed=5))
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-vlm-ignored"] == f"best_of, a??b??, {'x' * 64}"
    assert engine.submitted[0].sampling == SamplingParams(LONGEST, seed=5)
    assert (await refusal(client, chat(functions=[{}])))["param"] == "functions"


async def test_list_of_ignored_fields_is_bounded(connect: Connect) -> None:
    client = connect(Settings(server=Server(unknown_fields="ignore")))
    answer = await client.post(ROUTE, json=chat(**{f"field{i}": 1 for i in range(1000)}))
    names = answer.headers["x-vlm-ignored"].split(", ")
    assert (len(names), names[0], names[-1]) == (MAX_NAMES, "field0", "...")


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"{", "line 1, column 2"),
        (b'{"a": 1,\n "b": tru}', "line 2, column 7"),
        (b"{'model': 'demo'}", "line 1, column 2"),
        (b'{"a": 1}\nx', "line 2, column 1"),
    ],
)
async def test_error_names_place_of_broken_json(
    client: httpx.AsyncClient, body: bytes, where: str
) -> None:
    assert where in (await refusal(client, body))["message"]


@pytest.mark.parametrize("name", ["x" * 100_000, "a`b\nc\u202e", "\0"])
async def test_error_messages_are_printable_for_any_field_name(
    client: httpx.AsyncClient, name: str
) -> None:
    error = await refusal(client, {**chat(), name: 1})
    assert error["code"] == "unsupported_parameter"
    assert error["message"].isprintable()


async def test_lone_surrogates_are_refused_anywhere(
    client: httpx.AsyncClient,
) -> None:
    half = "\ud800"
    for body in (
        {**chat(), half: 1},
        chat(stream_options={half: 1}, stream=True),
        chat({"role": half, "content": "x"}),
        chat({"role": "user", half: "x"}),
        chat(user(half)),
        chat(user({"type": half})),
        chat(user({"type": "text", "text": half})),
        chat(user({"type": "image_url", "image_url": half})),
        chat(user({"type": "image_url", "image_url": {"url": PNG_URL, "detail": half}})),
        chat(stop=half),
        chat(logit_bias={half: 1}),
        chat(logit_bias={"5": half}),
        chat(prediction={"type": "content", "content": half}),
        chat(prediction={"type": "content", "content": [{"type": "text", "text": half}]}),
    ):
        await refusal(client, body)


async def test_prediction_counts_as_text(connect: Connect) -> None:
    client = connect(Settings(limits=Limits(max_text_bytes=20)))
    prediction = {"type": "content", "content": "x" * 21}
    error = await refusal(client, chat(prediction=prediction))
    assert "limits.max_text_bytes" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"{} {}",
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
        json.dumps(chat()).encode("utf-16"),
        b'{"model": "\xff"}',
        b"{'model': 'demo'}",
        b"[" * 10_000 + b"]" * 10_000,
        b'{"messages":' * 10_000 + b"1" + b"}" * 10_000,
        b'{"user":' + b"[" * 100_000,
        b'{"user": NaN, "model": "demo", "messages": [{"role": "user", "content": "a"}]}',
        b'{"model": "demo", "model": "demo", "messages": [{"role": "user", "content": "a"}]}',
        b'{"model": "demo", "messages": [{"role": "user", "content": "a", "content": "b"}]}',
    ],
)
async def test_chat_body_must_be_json_object(client: httpx.AsyncClient, body: bytes) -> None:
    await refusal(client, body)


async def test_error_messages_do_not_repeat_payload(client: httpx.AsyncClient) -> None:
    secret = "swordfish" * 1000
    for body in (
        chat(temperature=secret),
        chat(stop=[secret]),
        chat(messages=secret),
        chat(logit_bias={secret: 1}),
        chat(logit_bias={"5": secret}),
        chat({"role": secret, "content": "x"}),
        chat({"role": "user", "content": [{"type": secret}]}),
        chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": secret}}]}),
    ):
        assert "swordfish" not in (await refusal(client, body))["message"]


@pytest.mark.parametrize("model", ["gpt-4o", "DEMO", "demo/../x", "x" * 100_000])
async def test_chat_with_unknown_model_is_not_found(client: httpx.AsyncClient, model: str) -> None:
    answer = await client.post(ROUTE, json={**chat(), "model": model})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "`demo`" in error["message"]


@pytest.mark.parametrize("name", ["gpt-4o", "claude-3-5-sonnet", "my", "demo"])
async def test_chat_accepts_model_aliases(connect: Connect, name: str) -> None:
    client = connect(Settings(model=ModelSettings(aliases=("gpt-*", "claude-?-[0-9]*", "my"))))
    answer = await client.post(ROUTE, json={**chat(), "model": name})
    assert answer.json()["model"] == "demo", answer.text
    for other in ("Gpt-4o", "gpt4", "mine", "claude-x", "gpt-" + "x" * 500):
        assert (await client.post(ROUTE, json={**chat(), "model": other})).status_code == 404


async def test_chat_accepts_default_as_model(client: httpx.AsyncClient) -> None:
    answer = await client.post(ROUTE, json={**chat(), "model": "default"})
    assert answer.json()["model"] == "demo"
