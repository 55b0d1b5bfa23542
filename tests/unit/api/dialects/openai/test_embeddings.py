"""Requests for vectors and rankings: the forms of inputs, errors by field, and answers as JSON."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.image_files import data_url, image_file
from tests.unit.api.conftest import Connect
from tests.unit.api.requests import image_part, text, user
from tests.unit.api.scripted_engine import ScriptedEngine, failed
from vlm_server.protocol import (
    ContentPart,
    Finished,
    ImagePart,
    Pooling,
    TextPart,
    Usage,
    Vectors,
)
from vlm_server.settings import Limits, Settings

PNG = data_url(image_file("PNG", (9, 7)))
ROWS = np.array([[0.5, -0.25], [1 / 3, 2.0]], dtype="<f4")


def vectors(*rows: Any, is_multi: bool = False) -> Any:
    made = tuple(
        Vectors(np.asarray(each, "<f4").tobytes(), np.shape(each)[-1], is_multi) for each in rows
    )
    return lambda request_id: Finished(request_id, Usage(7, 0, 3), vectors=made)


def scores(*values: float) -> Any:
    return lambda request_id: Finished(request_id, Usage(7, 0), scores=values)


async def embed(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/embeddings", json={"model": "demo", **fields})


async def rerank(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/rerank", json={"model": "demo", **fields})


TEXT, IMAGE = TextPart("hi"), ImagePart(0)
FORMS: list[tuple[Any, list[tuple[ContentPart, ...] | list[int]]]] = [
    ("hi", [(TEXT,)]),
    (["hi", "ho"], [(TEXT,), (TextPart("ho"),)]),
    (PNG, [(IMAGE,)]),
    ([5, 6], [[5, 6]]),
    ([[5, 6], [7]], [[5, 6], [7]]),
    (["hi", [7]], [(TEXT,), [7]]),
    ([[text("hi"), image_part(PNG)]], [(TEXT, IMAGE)]),
    ([text("hi")], [(TEXT,)]),
    ([{"content": [text("hi")]}, {"content": "hi"}], [(TEXT,), (TEXT,)]),
    (text("hi"), [(TEXT,)]),
    ([{"text": "hi"}, {"image": PNG}], [(TEXT,), (IMAGE,)]),
    ({"text": "hi", "image": PNG.partition(",")[2]}, [(IMAGE, TEXT)]),
    ([PNG, PNG], [(IMAGE,), (ImagePart(1),)]),
]


@pytest.mark.parametrize(("value", "expected"), FORMS, ids=lambda v: str(v)[:40])
async def test_inputs_reach_engine_in_their_forms(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    value: Any,
    expected: list[tuple[ContentPart, ...] | list[int]],
) -> None:
    engine.script = (vectors(*ROWS[:1]),)
    answer = await embed(client, input=value)
    assert answer.status_code == 200, answer.text
    (submit,) = engine.submitted
    found = [
        list(each.prompt) if each.prompt is not None else each.messages[0].content
        for each in submit.inputs
    ]
    assert found == expected
    is_list = isinstance(value, list) and not isinstance(value[0], int)
    params = [f"input[{i}]" for i in range(len(expected))] if is_list else ["input"]
    assert [each.param for each in submit.inputs] == params
    assert submit.pooling == Pooling("embed")
    assert not submit.messages


async def test_messages_are_one_input(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script = (vectors(*ROWS[:1]),)
    system = {"role": "system", "content": "Find it."}
    answer = await embed(client, messages=[system, user("hi")])
    assert answer.status_code == 200, answer.text
    (given,) = engine.submitted[0].inputs
    assert [message.role for message in given.messages] == ["system", "user"]


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({}, "input", "invalid_value"),
    ({"input": "hi", "messages": [user("hi")]}, "input", "invalid_value"),
    ({"input": []}, "input", "invalid_value"),
    ({"input": [[]]}, "input[0]", "invalid_value"),
    ({"input": ["hi", 5]}, "input[1]", "invalid_value"),
    ({"input": [5, "hi"]}, "input", "invalid_value"),
    ({"input": [5, -1]}, "input", "invalid_value"),
    ({"input": [[5], [6, 7.5]]}, "input[1]", "invalid_value"),
    ({"input": [{"video": "x"}]}, "input[0]", "invalid_value"),
    ({"input": [[{"type": "audio"}]]}, "input[0]", "invalid_value"),
    ({"input": ["hi", "data:image/png;base64,AAAA"]}, "input[1]", "invalid_image"),
    ({"input": "\ud800"}, "input", "invalid_value"),
    ({"input": "hi", "dimensions": 0}, "dimensions", "invalid_value"),
    ({"input": "hi", "encoding_format": "hex"}, "encoding_format", "invalid_value"),
    ({"input": "hi", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens",
     "unsupported_parameter"),
    ({"input": "hi", "colour": "red"}, "colour", "unsupported_parameter"),
    ({"input": "hi", "model": "other"}, "model", "model_not_found"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "code"), WRONG, ids=str)
async def test_wrong_fields_are_named(
    client: httpx.AsyncClient, engine: ScriptedEngine, fields: dict[str, Any], param: str, code: str
) -> None:
    body = json.dumps({"model": "demo", **fields}).encode()
    answer = await client.post(
        "/v1/embeddings", content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert not engine.submitted


@pytest.mark.parametrize(
    ("limits", "value"),
    [
        (Limits(max_inputs=2), ["a", "b", "c"]),
        (Limits(max_images=1), [PNG, [image_part(PNG)]]),
        (Limits(max_images=1), [{"image": PNG}, {"content": [image_part(PNG)]}]),
        (Limits(max_parts=2), [[text("a"), text("b")], "c"]),
        (Limits(max_text_bytes=3), ["ab", "cd"]),
        (Limits(max_videos=0), [[{"type": "video_url", "video_url": "data:video/mp4;base64,A"}]]),
    ],
    ids=str,
)
async def test_limits_hold_over_all_inputs(
    connect: Connect, engine: ScriptedEngine, limits: Limits, value: Any
) -> None:
    answer = await embed(connect(Settings(limits=limits)), input=value)
    assert answer.status_code == 400
    assert "limits.max_" in answer.json()["error"]["message"]
    assert not engine.submitted


async def test_many_token_ids_are_read_and_more_are_refused(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (vectors(*ROWS[:1]),)
    answer = await embed(client, input=[[5] * 300 for _ in range(1000)])
    assert answer.status_code == 200
    assert sum(len(each.prompt or ()) for each in engine.submitted[0].inputs) == 300_000
    answer = await embed(client, input=[[5] * 1000 for _ in range(1100)])
    assert answer.status_code == 400
    assert "values" in answer.json()["error"]["message"]


async def test_vectors_are_exact_numbers_or_base64(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (vectors(ROWS[:1], ROWS[1:]),)
    answer = (await embed(client, input=["hi", "ho"])).json()
    assert answer["object"] == "list"
    assert answer["model"] == "demo"
    assert answer["usage"] == {
        "prompt_tokens": 7,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert [each["index"] for each in answer["data"]] == [0, 1]
    assert np.array_equal(np.float32([each["embedding"] for each in answer["data"]]), ROWS)
    encoded = (await embed(client, input=["hi", "ho"], encoding_format="base64")).json()
    for each, row in zip(encoded["data"], ROWS, strict=True):
        assert base64.b64decode(each["embedding"]) == row.tobytes()


async def test_vectors_of_each_token_are_listed(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (vectors(ROWS, ROWS[:1], is_multi=True),)
    data = (await embed(client, input=["hi", "ho"])).json()["data"]
    assert np.array_equal(np.float32(data[0]["embedding"]), ROWS)
    assert np.array_equal(np.float32(data[1]["embedding"]), ROWS[:1])


async def test_large_answer_is_encoded_whole(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    rows = np.random.default_rng(0).standard_normal((64, 1024)).astype("<f4")
    engine.script = (vectors(*rows),)
    data = (await embed(client, input=["hi"] * 64)).json()["data"]
    assert np.array_equal(np.float32([each["embedding"] for each in data]), rows)


async def test_error_of_engine_reaches_client(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (failed("invalid_value", "no such type", "input_type"),)
    answer = await embed(client, input="hi", input_type="poem")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input_type"


@pytest.mark.parametrize(
    ("name", "known_as"),
    [("search_query", "query"), ("passage", "document"), ("title", "title"), (None, "")],
)
async def test_input_types_have_names_of_several_apis(
    client: httpx.AsyncClient, engine: ScriptedEngine, name: str | None, known_as: str
) -> None:
    engine.script = (vectors(*ROWS[:1]),)
    await embed(client, input="hi", input_type=name, instruction="Find")
    assert engine.submitted[0].pooling == Pooling("embed", None, known_as, "Find")


async def test_fields_without_effect_are_reported(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (vectors(*ROWS[:1]),)
    part = {**text("hi"), "cache_control": {}, "colour": "red"}
    answer = await embed(client, input=[[part]], user="me")
    assert answer.headers["X-VLM-Ignored"] == "user, input[][].colour"


# ---- rankings ----------------------------------------------------------------------------


async def test_query_and_documents_are_inputs(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (scores(0.5, 0.75),)
    await rerank(client, query=[image_part(PNG)], documents=["hi", {"image": PNG}])
    (submit,) = engine.submitted
    assert submit.pooling == Pooling("score")
    assert [each.messages[0].content for each in submit.inputs] == [
        (ImagePart(0),),
        (TEXT,),
        (ImagePart(1),),
    ]
    assert [each.param for each in submit.inputs] == ["query", "documents[0]", "documents[1]"]


async def test_ranking_has_best_first_and_equals_in_order(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (scores(0.25, 0.5, 0.25, 0.75),)
    documents = ["a", "b", {"text": "c"}, [text("d")]]
    answer = (await rerank(client, query="q", documents=documents)).json()
    assert [each["index"] for each in answer["results"]] == [3, 1, 0, 2]
    assert answer["results"][0] == {"index": 3, "relevance_score": 0.75}
    assert answer["id"].startswith("rerank-")
    assert answer["usage"]["total_tokens"] == 7
    fields = {"query": "q", "documents": documents, "return_documents": True, "top_n": 2}
    answer = (await rerank(client, **fields)).json()
    assert [each["document"] for each in answer["results"]] == [
        {"content": [text("d")]},
        {"text": "b"},
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": "q"}, "documents"),
        ({"documents": ["a"]}, "query"),
        ({"query": "q", "documents": []}, "documents"),
        ({"query": "q", "documents": ["a", [5]]}, "documents[1]"),
        ({"query": "", "documents": ["a"], "top_n": -1}, "top_n"),
        ({"query": "q", "documents": ["a"], "rank_fields": ["title"]}, "rank_fields"),
    ],
    ids=str,
)
async def test_wrong_fields_of_rankings_are_named(
    client: httpx.AsyncClient, engine: ScriptedEngine, fields: dict[str, Any], param: str
) -> None:
    answer = await rerank(client, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not engine.submitted
