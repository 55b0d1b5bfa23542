"""A conversation's routing key stays the same over turns and dialects, and is echoed."""

from __future__ import annotations

import hashlib
from typing import Any

import httpx
import pytest

from tests.support.image_files import data_url, image_file
from tests.unit.api.requests import PNG_URL, assistant, called, chat, image_part, result, text, user
from tests.unit.api.scripted_engine import ScriptedEngine, failed
from vlm_server.api.parsing import routing_key
from vlm_server.protocol import Message, SamplingParams, Submit, TextPart

CHAT, RESPONSES, OLLAMA, GENERATE = (
    "/v1/chat/completions",
    "/v1/responses",
    "/api/chat",
    "/api/generate",
)
PNG = image_file("PNG")
OTHER_URL = data_url(image_file("JPEG"))
SAID = {"role": "assistant", "content": "A circle."}


async def key_of(client: httpx.AsyncClient, route: str, body: Any, **headers: str) -> str | None:
    answer = await client.post(route, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    key: str | None = answer.headers.get("x-vlm-routing-key")
    return key


async def test_routing_key_of_conversation_is_hash_of_first_image(
    client: httpx.AsyncClient,
) -> None:
    """Clients can compute the SHA-256; later images do not change it."""
    first = user(image_part(), text())
    later = user(image_part(OTHER_URL), text("And this?"))
    turns = [[first], [first, SAID, later], [user(image_part(), text("And its colour?"))]]
    keys = [await key_of(client, CHAT, chat(*messages)) for messages in turns]
    assert keys == [hashlib.sha256(PNG).hexdigest()] * 3


async def test_routing_key_of_text_stays_over_turns(client: httpx.AsyncClient) -> None:
    """A later image does not change the key; another first question does."""
    system = {"role": "system", "content": "Be brief."}
    call = assistant(called("a"))
    turns = [
        [system, user("Look.")],
        [system, user("Look."), SAID, user("And now?")],
        [system, user("Look."), call, result("a", image_part())],
    ]
    keys = {await key_of(client, CHAT, chat(*messages)) for messages in turns}
    other = await key_of(client, CHAT, chat(system, user("Listen.")))
    assert len(keys) == 1
    assert other not in keys


async def test_routing_key_of_image_is_equal_in_every_dialect(
    client: httpx.AsyncClient,
) -> None:
    base64 = PNG_URL.partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": base64}
    question = {"type": "text", "text": "What?"}
    requests = {
        CHAT: chat(user(image_part(), text())),
        "/v1/messages": chat(user({"type": "image", "source": source}, question), max_tokens=9),
        RESPONSES: {
            "model": "demo",
            "input": [user({"type": "input_image", "image_url": PNG_URL})],
        },
        OLLAMA: {"model": "demo", "messages": [{**user("What?"), "images": [base64]}]},
        GENERATE: {"model": "demo", "prompt": "What?", "images": [base64]},
    }
    keys = {route: await key_of(client, route, body) for route, body in requests.items()}
    assert set(keys.values()) == {hashlib.sha256(PNG).hexdigest()}, keys


async def test_response_continues_with_previous_routing_key(client: httpx.AsyncClient) -> None:
    first = await client.post(RESPONSES, json={"model": "demo", "input": "Look."})
    body = {"model": "demo", "input": "Again.", "previous_response_id": first.json()["id"]}
    assert await key_of(client, RESPONSES, body) == first.headers["x-vlm-routing-key"]


@pytest.mark.parametrize("route", [CHAT, RESPONSES])
async def test_prompt_cache_key_decides_routing_key(client: httpx.AsyncClient, route: str) -> None:
    """The key stays even when the first turns are dropped from the conversation."""

    def named(name: str, words: str) -> dict[str, Any]:
        asked = chat(user(words)) if route == CHAT else {"model": "demo", "input": words}
        return {**asked, "prompt_cache_key": name}

    first, forgetful, other = [
        await key_of(client, route, named(*case)) for case in (("a", "x"), ("a", "y"), ("b", "x"))
    ]
    assert first == forgetful != other
    assert first is not None
    assert len(first) <= routing_key.MAX_CHARS


async def test_routing_key_header_is_echoed(client: httpx.AsyncClient) -> None:
    request = chat(user(image_part(), text()))
    assert await key_of(client, CHAT, request, **{"X-SMG-Routing-Key": "mine"}) == "mine"
    streamed = {**request, "stream": True}
    assert await key_of(client, CHAT, streamed, **{"X-SMG-Routing-Key": "mine"}) == "mine"


@pytest.mark.parametrize("key", ["", "x" * 129, "tab\tin it"])
async def test_invalid_routing_key_header_is_replaced(client: httpx.AsyncClient, key: str) -> None:
    echoed = await key_of(client, CHAT, chat(), **{"X-SMG-Routing-Key": key})
    assert echoed == await key_of(client, CHAT, chat())


async def test_error_responses_carry_routing_key(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (failed("engine_died", "It died."),)
    answer = await client.post(CHAT, json=chat(user(image_part(), text())))
    assert answer.status_code == 502
    assert answer.headers["x-vlm-routing-key"] == hashlib.sha256(PNG).hexdigest()
    headers = {"X-SMG-Routing-Key": "mine"}
    refused = await client.post(CHAT, json={"model": "demo"}, headers=headers)
    assert (refused.status_code, refused.headers["x-vlm-routing-key"]) == (400, "mine")


async def test_requests_without_prompt_have_no_routing_key(client: httpx.AsyncClient) -> None:
    assert await key_of(client, OLLAMA, {"model": "demo", "messages": []}) is None
    assert "x-vlm-routing-key" not in (await client.get("/v1/models")).headers


def test_growing_prompt_keeps_its_routing_key() -> None:
    def submit(prompt: str) -> Submit:
        return Submit("id", (), (), SamplingParams(), prompt=prompt)

    long = "word " * 60
    assert routing_key.of_submit(submit(long)) == routing_key.of_submit(submit(long + "more"))
    assert routing_key.of_submit(submit("a")) != routing_key.of_submit(submit("b"))


def test_routing_key_depends_on_message_roles() -> None:
    def submit(role: Any) -> Submit:
        messages = (Message(role, (TextPart("Look."),)), Message("user", (TextPart("Now."),)))
        return Submit("id", messages, (), SamplingParams())

    assert routing_key.of_submit(submit("system")) != routing_key.of_submit(submit("user"))
