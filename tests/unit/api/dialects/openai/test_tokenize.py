"""`/v1/tokenize` and `/v1/detokenize`: the submitted request, and the answer."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.unit.api.requests import PNG_URL, chat, image_part, text, user
from tests.unit.api.scripted_engine import ScriptedEngine
from vlm_server.api.dialects.openai import tokenize
from vlm_server.api.parsing.parsed_request import Context, KnownModel, Parse
from vlm_server.errors import InvalidRequest
from vlm_server.protocol import Finished, ImageUse, ModelFacts, TextPart, Usage
from vlm_server.settings import Limits

IDS = (5, 6, 7)


@pytest.fixture
def counting(engine: ScriptedEngine) -> ScriptedEngine:
    """An engine that answers with a token count."""
    use = ImageUse(308, 196, 77)
    engine.script = (
        lambda request_id: Finished(
            request_id, Usage(3, 0, 2), images=(use,), token_ids=IDS, text="a b c"
        ),
    )
    engine.status = replace(engine.status, model_facts=ModelFacts(context_tokens=4096))
    return engine


@pytest.mark.parametrize("route", ["/v1/tokenize", "/tokenize"])
async def test_tokenize_counts_prompt(
    client: httpx.AsyncClient, counting: ScriptedEngine, route: str
) -> None:
    answer = await client.post(route, json={"prompt": "a b c"})
    assert answer.json() == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": [5, 6, 7],
        "token_strs": None,
        "cached_tokens": 2,
        "images": [{"width": 308, "height": 196, "tokens": 77}],
        "videos": [],
    }
    (submit,) = counting.submitted
    assert (submit.prompt, submit.messages, submit.count_only) == ("a b c", (), True)


@pytest.mark.parametrize("has_image", [False, True])
async def test_tokenize_reads_messages_like_chat_request(
    client: httpx.AsyncClient, counting: ScriptedEngine, has_image: bool
) -> None:
    parts = [text("What?"), *([image_part(PNG_URL)] if has_image else [])]
    limits = {"min_pixels": 1000, "max_pixels": 2000}
    body = {"messages": [user(*parts)], "mm_processor_kwargs": limits}
    answer = await client.post("/v1/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    await client.post("/v1/chat/completions", json=chat(*body["messages"]))
    counted, chat_submit = counting.submitted
    assert counted.messages == chat_submit.messages
    assert (counted.count_only, chat_submit.count_only) == (True, False)
    assert [(i.min_pixels, i.max_pixels) for i in counted.images] == [(1000, 2000)] * has_image


async def test_tokenize_reports_fields_without_effect(
    client: httpx.AsyncClient, counting: ScriptedEngine
) -> None:
    body = chat(user("hi"), temperature=1, stream=True, max_tokens=5)
    answer = await client.post("/v1/tokenize", json=body)
    assert answer.json()["count"] == 3
    ignored = answer.headers["x-vlm-ignored"].split(", ")
    assert sorted(ignored) == ["max_tokens", "stream", "temperature"]


async def test_detokenize_returns_prompt(
    client: httpx.AsyncClient, counting: ScriptedEngine
) -> None:
    answer = await client.post("/v1/detokenize", json={"model": "demo", "tokens": [5, 6]})
    assert answer.json() == {"prompt": "a b c"}
    (submit,) = counting.submitted
    assert (submit.prompt, submit.count_only) == ((5, 6), True)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": []}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
        ({"messages": [user("a")], "add_special_tokens": True}, "add_special_tokens"),
        ({"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ({"messages": [user("a")], "add_generation_prompt": False}, "add_generation_prompt"),
        ({"prompt": "a", "colour": "red"}, "colour"),
        ({"messages": [user("a")], "colour": "red"}, "colour"),
    ],
    ids=str,
)
async def test_wrong_tokenize_bodies_are_refused_by_name(
    client: httpx.AsyncClient, counting: ScriptedEngine, body: dict[str, Any], param: str
) -> None:
    answer = await client.post("/v1/tokenize", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert counting.submitted == []


@pytest.mark.parametrize(
    "body", [{}, {"tokens": []}, {"tokens": [-1]}, {"tokens": ["a"]}, {"tokens": [1], "x": 1}]
)
async def test_detokenize_refuses_bodies_without_tokens(
    client: httpx.AsyncClient, counting: ScriptedEngine, body: dict[str, Any]
) -> None:
    assert (await client.post("/v1/detokenize", json=body)).status_code == 400
    assert counting.submitted == []


@pytest.mark.parametrize("route", ["tokenize", "detokenize"])
async def test_tokenize_of_unknown_model_is_404(
    client: httpx.AsyncClient, counting: ScriptedEngine, route: str
) -> None:
    body = (
        {"model": "gpt-4o", "prompt": "a"}
        if route == "tokenize"
        else {
            "model": "gpt-4o",
            "tokens": [1],
        }
    )
    assert (await client.post(f"/v1/{route}", json=body)).status_code == 404


@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": ""}], ids=str)
@pytest.mark.parametrize(
    ("read", "body"),
    [
        (tokenize.parse_prompt, {"prompt": "a"}),
        (tokenize.parse_prompt, {"messages": [user("a")]}),
        (tokenize.parse_tokens, {"tokens": [1]}),
    ],
)
def test_tokenize_must_name_one_of_several_models(
    read: Parse,
    body: dict[str, Any],
    model: dict[str, Any],
) -> None:
    content = json.dumps(body | model).encode()
    one, two = KnownModel("one"), KnownModel("two")
    alone = read(content, Context((one,), "r", "", "", Limits()))
    assert alone.model == "one"
    with pytest.raises(InvalidRequest, match=r"`model` is missing.*`one`, `two`") as caught:
        read(content, Context((one, two), "r", "", "", Limits()))
    assert caught.value.param == "model"


async def test_tokenize_message_reaches_engine_as_text(
    client: httpx.AsyncClient, counting: ScriptedEngine
) -> None:
    await client.post("/v1/tokenize", json={"messages": [user("hi")]})
    assert counting.submitted[0].messages[0].content == (TextPart("hi"),)
