"""`response_format` reaches the engine as a schema, or is refused by name."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.unit.api.dialects.openai.test_chat_fields import refusal
from tests.unit.api.requests import ROUTE, chat
from tests.unit.api.scripted_engine import ScriptedEngine
from vlm_server.api.parsing.json_schema import MAX_SCHEMA_DEPTH
from vlm_server.protocol import SamplingParams
from vlm_server.settings import Limits

LONGEST = Limits().default_max_tokens

SCHEMA_PARAM = "response_format.json_schema.schema"
OBJECT = {"type": "json_object"}


def schema_format(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


def nested(depth: int) -> dict[str, Any]:
    """A schema of `depth` nested objects and lists."""
    schema: Any = [] if depth % 2 else {}
    for _ in range((depth - 1) // 2):
        schema = {"anyOf": [schema]}
    return schema if isinstance(schema, dict) else {"enum": schema}


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "text", "json_schema": None}, None),
        ({**OBJECT, "json_schema": None}, '{"type":"object"}'),
        (OBJECT, '{"type":"object"}'),
        (schema_format({}), "{}"),
        (schema_format({"enum": ["é", 1.5]}, strict=True), '{"enum":["é",1.5]}'),
        (schema_format({"b": 1, "a": 2}, strict=False, description="d"), '{"b":1,"a":2}'),
        (schema_format({}, strict=None, description=None), "{}"),
    ],
)
async def test_response_format_schema_reaches_engine(
    client: httpx.AsyncClient, engine: ScriptedEngine, value: Any, schema: str | None
) -> None:
    answer = await client.post(ROUTE, json=chat(response_format=value))
    assert answer.status_code == 200, answer.text
    assert engine.submitted[0].sampling == SamplingParams(LONGEST, json_schema=schema)


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("json_object", "response_format"),
        ([], "response_format"),
        ({}, "response_format.type"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": "grammar"}, "response_format.type"),
        ({"type": 5}, "response_format.type"),
        ({"type": "json_object", "schema": {}}, "response_format.schema"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": "{}"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, SCHEMA_PARAM),
        (
            {"type": "json_schema", "json_schema": {"schema": {}}},
            "response_format.json_schema.name",
        ),
        (schema_format({}, name=""), "response_format.json_schema.name"),
        (schema_format({}, name="a b"), "response_format.json_schema.name"),
        (schema_format({}, name="x" * 65), "response_format.json_schema.name"),
        (schema_format({}, strict="yes"), "response_format.json_schema.strict"),
        (schema_format({}, extra=1), "response_format.json_schema.extra"),
        (schema_format("{}"), SCHEMA_PARAM),
        (schema_format([]), SCHEMA_PARAM),
        (schema_format(True), SCHEMA_PARAM),
        (schema_format({"const": "\ud800"}), SCHEMA_PARAM),
        (schema_format({"\udfff": 1}), SCHEMA_PARAM),
        (schema_format({"const": "x" * Limits().max_schema_bytes}), SCHEMA_PARAM),
    ],
)
async def test_wrong_response_format_is_refused_by_name(
    client: httpx.AsyncClient, engine: ScriptedEngine, value: Any, param: str
) -> None:
    assert (await refusal(client, chat(response_format=value)))["param"] == param
    assert engine.submitted == []


async def test_unknown_response_format_type_names_known_ones(client: httpx.AsyncClient) -> None:
    error = await refusal(client, chat(response_format={"type": "xml"}))
    assert "'json_schema'" in error["message"]


async def test_schema_numbers_beyond_all_bounds_are_refused(client: httpx.AsyncClient) -> None:
    body = json.dumps(chat(response_format=schema_format({"const": "HUGE"})))
    error = await refusal(client, body.replace('"HUGE"', "1e999").encode())
    assert error["param"] == SCHEMA_PARAM


async def test_schema_depth_is_bounded(client: httpx.AsyncClient) -> None:
    deepest = schema_format(nested(MAX_SCHEMA_DEPTH))
    assert (await client.post(ROUTE, json=chat(response_format=deepest))).status_code == 200
    error = await refusal(client, chat(response_format=schema_format(nested(MAX_SCHEMA_DEPTH + 1))))
    assert error["param"] == SCHEMA_PARAM
    assert "levels deep" in error["message"]


@pytest.mark.parametrize("fields", [{"min_tokens": 1}, {"ignore_eos": True}])
@pytest.mark.parametrize("value", [OBJECT, schema_format({})])
async def test_response_format_refuses_fields_that_prolong_json(
    client: httpx.AsyncClient, fields: dict[str, Any], value: Any
) -> None:
    error = await refusal(client, chat(response_format=value, **fields))
    assert [error["param"]] == list(fields)


@pytest.mark.parametrize(
    "fields",
    [{"min_tokens": 0}, {"ignore_eos": False}, {"stop": "}"}, {"logprobs": True}, {"stream": True}],
)
async def test_response_format_allows_other_fields(
    client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    answer = await client.post(ROUTE, json=chat(response_format=OBJECT, **fields))
    assert answer.status_code == 200, answer.text


async def test_text_format_allows_fields_that_prolong_it(client: httpx.AsyncClient) -> None:
    fields = {"min_tokens": 2, "ignore_eos": True, "response_format": {"type": "text"}}
    assert (await client.post(ROUTE, json=chat(**fields))).status_code == 200
