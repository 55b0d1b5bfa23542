"""Errors in every dialect say what was sent in place of an image or of JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.unit.api.requests import PNG_URL, assistant, called, result, user
from tests.unit.api.scripted_engine import ScriptedEngine

PNG = PNG_URL.partition(",")[2]
START = "data:image/png;base64,"


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def chat(url: str) -> tuple[str, dict[str, Any]]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return "/v1/chat/completions", {"messages": [user(part)]}


def tool_result(url: str) -> tuple[str, dict[str, Any]]:
    part = {"type": "image_url", "image_url": {"url": url}}
    history = [user("hi"), assistant(called("1")), result("1", part)]
    return "/v1/chat/completions", {"messages": history}


def tokenize(url: str) -> tuple[str, dict[str, Any]]:
    return "/v1/tokenize", chat(url)[1]


def responses(url: str) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": [user({"type": "input_image", "image_url": url})]}


def messages_url(url: str) -> tuple[str, dict[str, Any]]:
    source = {"type": "url", "url": url}
    return "/v1/messages", {"messages": [user({"type": "image", "source": source})]}


def messages(data: str) -> tuple[str, dict[str, Any]]:
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return "/v1/messages", {"messages": [user({"type": "image", "source": source})]}


def ollama_chat(data: str) -> tuple[str, dict[str, Any]]:
    return "/api/chat", {"messages": [{**user("hi"), "images": [data]}]}


def generate(data: str) -> tuple[str, dict[str, Any]]:
    return "/api/generate", {"prompt": "hi", "images": [data]}


Write = Callable[[str], tuple[str, dict[str, Any]]]
OF_URLS: tuple[Write, ...] = (chat, tool_result, tokenize, responses, messages_url)
OF_BASE64: tuple[Write, ...] = (messages, ollama_chat, generate)
FILES = {
    "It looks like JPEG XL.": b"\xff\x0a" + bytes(64),
    "begins like TIFF": b"II*\0" + bytes(64),
    "It looks like PDF.": b"%PDF-1.7\n" + bytes(64),
    "It looks like SVG.": b"<svg xmlns='http://www.w3.org/2000/svg'></svg>",
    "It looks like MP4 or MOV.": b"\0\0\0\x18ftypmp42" + bytes(64),
    "It looks like base64 again: it was encoded twice.": PNG.encode(),
}
NO_BASE64 = {
    "Python's bytes (b'...')": f"b'{PNG}'",
    "percent escapes": PNG.replace("=", "%3D").replace("/", "%2F").replace("+", "%2B") + "%0A",
    "truncated": PNG[:-1],
    "is empty": "",
}
NO_DATA = {
    "not a path": "/home/me/shot.png",
    "not a URL of the scheme `http:`": "http://example.org/shot.png",
}


async def refusal(
    client: httpx.AsyncClient, engine: ScriptedEngine, route: str, fields: dict[str, Any]
) -> str:
    answer = await client.post(route, json={"model": "demo", **fields})
    assert answer.status_code == 400, answer.text
    assert engine.submitted == []
    error = answer.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize("write", [*OF_URLS, *OF_BASE64], ids=lambda write: write.__name__)
async def test_wrong_image_error_names_sent_media(
    client: httpx.AsyncClient, engine: ScriptedEngine, write: Write
) -> None:
    sent = {words: base64_of(data) for words, data in FILES.items()} | NO_BASE64
    for words, data in sent.items():
        wrong = START + data if write in OF_URLS else data
        assert words in await refusal(client, engine, *write(wrong))
    for words, place in NO_DATA.items():
        assert words in await refusal(client, engine, *write(place))


@pytest.mark.parametrize("write", OF_URLS, ids=lambda write: write.__name__)
async def test_wrong_data_url_prefix_is_explained(
    client: httpx.AsyncClient, engine: ScriptedEngine, write: Write
) -> None:
    assert "twice" in await refusal(client, engine, *write(START + START + PNG))
    bare = await refusal(client, engine, *write(PNG))
    assert "write 'data:image/...;base64,' before the base64" in bare
    assert "urls.https_hosts" in await refusal(client, engine, *write("https://example.org/a.png"))
    assert "urls.file_folders" in await refusal(client, engine, *write("file:///a.png"))


async def test_anthropic_base64_must_have_no_data_url_prefix(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    assert "alone" in await refusal(client, engine, *messages(START + PNG))


@pytest.mark.parametrize("write", [*OF_URLS, *OF_BASE64], ids=lambda write: write.__name__)
async def test_broken_json_error_has_line_and_column(
    client: httpx.AsyncClient, write: Write
) -> None:
    route, fields = write(PNG)
    body = json.dumps({"model": "demo", **fields})
    for content, words in (
        (body[:-1] + ",\n}", "line 2, column 1"),
        (body.replace('"demo"', "'demo'"), "line 1, column 11"),
        (body.replace("demo", "de\nmo"), "column 14: Invalid control character."),
        (body[:-1] + ', "model": "demo"}', "a duplicate name in an object: `model`"),
        ("", "has no body"),
    ):
        answer = await client.post(
            route, content=content, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 400
        assert words in answer.text.replace('\\"', '"'), answer.text
