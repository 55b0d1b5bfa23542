"""Documents in requests of all dialects: their pages as images, in order, and their texts."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import pdf
from tests.unit.api.conftest import Connect
from tests.unit.api.requests import ROUTE, assistant, called, chat, image_part, result, text, user
from tests.unit.api.scripted_engine import ScriptedEngine, ended, finished
from tests.unit.api.scripted_engine import text as says
from vlm_server.protocol import (
    DocumentPage,
    DocumentUse,
    Finished,
    Image,
    ImagePart,
    Message,
    Submit,
    TextPart,
    Usage,
)
from vlm_server.settings import DocumentSettings, Limits, Settings, Urls

DATA = pdf.numbered(3)
URL = pdf.data_url(DATA)
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"


def file(data: str = URL, **fields: Any) -> dict[str, Any]:
    return {"type": "file", "file": {"file_data": data, **fields}}


def bodies(**options: Any) -> dict[str, dict[str, Any]]:
    """The same question about the same document in each dialect, by its route."""
    source = {"type": "base64", "media_type": "application/pdf", "data": URL.partition(",")[2]}
    return {
        ROUTE: chat(user(file(**options), text("So?"))),
        RESPONSES: {
            "model": "demo",
            "input": [
                user(
                    {"type": "input_file", "file_data": URL, **options},
                    {"type": "input_text", "text": "So?"},
                )
            ],
        },
        MESSAGES: {
            "model": "demo",
            "max_tokens": 9,
            "messages": [user({"type": "document", "source": source, **options}, text("So?"))],
        },
    }


async def submit_of(
    client: httpx.AsyncClient, engine: ScriptedEngine, body: Any, route: str = ROUTE
) -> Submit:
    answer = await client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return engine.submitted[-1]


async def error_of(client: httpx.AsyncClient, body: Any, status: int = 400) -> dict[str, str]:
    content, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    answer = await client.post(ROUTE, content=content, headers=headers)
    assert answer.status_code == status, answer.text
    error: dict[str, str] = answer.json()["error"]
    return error


def shown(message: Message) -> list[str | int]:
    """The texts of a message, and the indices of its images."""
    return [part.text if isinstance(part, TextPart) else index_of(part) for part in message.content]


def index_of(part: Any) -> int:
    assert isinstance(part, ImagePart)
    return part.index


def page_of(image: Image) -> DocumentPage:
    assert image.page is not None
    return image.page


async def test_every_dialect_shows_pages_in_order(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    submits = [await submit_of(client, engine, body, route) for route, body in bodies().items()]
    for submit in submits:
        expected = ["\nPage 1:\n", 0, "\nPage 2:\n", 1, "\nPage 3:\n", 2, "So?"]
        assert shown(submit.messages[-1]) == expected
        assert [page_of(image) for image in submit.images] == [
            DocumentPage(0, number, 3) for number in (1, 2, 3)
        ]
        for image in submit.images:
            assert (image.format, image.width, image.height) == ("PNG", 500, 500)
            assert image.content_hash == hashlib.sha256(image.data).hexdigest()
        assert [image.data for image in submit.images] == [i.data for i in submits[0].images]


async def test_options_are_those_of_every_dialect(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    for route, body in bodies(pages="3", max_pixels=10_000, include_text=True).items():
        submit = await submit_of(client, engine, body, route)
        assert shown(submit.messages[-1]) == [
            "\nPage 3:\n", 0, "\nText of page 3:\n21\n", "So?",
        ]  # fmt: skip
        assert (submit.images[0].width, submit.images[0].height) == (100, 100)


async def test_page_without_text_layer_says_so(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    blank = pdf.data_url(pdf.write([pdf.Page()]))
    submit = await submit_of(client, engine, chat(user(file(blank, include_text=True))))
    assert shown(submit.messages[0]) == [0, "\nText of page 1:\n(none)\n"]


async def test_single_page_is_like_its_picture(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    one = pdf.data_url(pdf.numbered(1))
    first = await submit_of(client, engine, chat(user(file(one), text())))
    picture = f"data:image/png;base64,{base64.b64encode(first.images[0].data).decode()}"
    second = await submit_of(client, engine, chat(user(image_part(picture), text())))
    assert first.messages == second.messages
    assert first.images[0].content_hash == second.images[0].content_hash


async def test_names_titles_and_context_come_first(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    submit = await submit_of(client, engine, bodies(filename="a.pdf", pages="1")[ROUTE])
    assert shown(submit.messages[-1])[0] == "Document: a.pdf"
    body = bodies(title="Report", context="Of this year.", pages="1")[MESSAGES]
    submit = await submit_of(client, engine, body, MESSAGES)
    assert shown(submit.messages[-1])[0] == "Document: Report\nOf this year."


async def test_documents_and_images_keep_their_places(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    other = pdf.data_url(pdf.numbered(2))
    parts = [image_part(), file(pages="2"), image_part(), file(other), file(pages="2")]
    body = chat(user(*parts), assistant(called("1")), result("1", file(other, pages="1")))
    submit = await submit_of(client, engine, body)
    assert [part for part in shown(submit.messages[0]) if isinstance(part, int)] == [*range(6)]
    pages = [image.page and (image.page.document, image.page.number) for image in submit.images]
    assert pages == [None, (0, 2), None, (1, 1), (1, 2), (2, 2), (3, 1)]
    assert submit.images[1].data == submit.images[5].data
    assert submit.images[3].param == "messages[0].content[3]"


async def test_base64_without_url_is_read_too(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    submit = await submit_of(client, engine, chat(user(file(URL.partition(",")[2]))))
    assert len(submit.images) == 3


async def test_documents_are_read_from_allowed_folders(
    connect: Connect, engine: ScriptedEngine, tmp_path: Path
) -> None:
    (tmp_path / "a.pdf").write_bytes(DATA)
    client = connect(Settings(urls=Urls(file_folders=(str(tmp_path),))))
    part = {"type": "input_file", "file_url": f"file://{tmp_path}/a.pdf"}
    body = {"model": "demo", "input": [user(part)]}
    assert len((await submit_of(client, engine, body, RESPONSES)).images) == 3
    assert "`urls.https_hosts`" not in (await error_of(client, chat(user(file("file:///b")))))


async def test_uploaded_documents_are_read_by_id(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    upload = {"file": ("a.pdf", DATA)}
    answer = await client.post("/v1/files", files=upload, data={"purpose": "user_data"})
    file_id = answer.json()["id"]
    inline = await submit_of(client, engine, chat(user(file(pages="2"))))
    part = {"type": "file", "file": {"file_id": file_id, "pages": "2"}}
    for route, body in (
        (ROUTE, chat(user(part))),
        (RESPONSES, {"input": [user({"type": "input_file", "file_id": file_id, "pages": "2"})]}),
        (MESSAGES, {"max_tokens": 9, "messages": [user({"type": "document", "pages": "2",
         "source": {"type": "file", "file_id": file_id}})]}),
    ):  # fmt: skip
        submit = await submit_of(client, engine, {**body, "model": "demo"}, route)
        assert submit.messages[-1].content == inline.messages[-1].content
        assert submit.images[0].data == inline.images[0].data
    image = {"file": ("a.png", inline.images[0].data)}
    answer = await client.post("/v1/files", files=image, data={"purpose": "vision"})
    part = {"type": "file", "file": {"file_id": answer.json()["id"], "pages": "1"}}
    error = await error_of(client, chat(user(part)))
    assert "looks like PNG" in error["message"]


async def test_stored_response_keeps_document(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    first = await client.post(RESPONSES, json=bodies(pages="1-2")[RESPONSES])
    body = {"model": "demo", "input": "And?", "previous_response_id": first.json()["id"]}
    submit = await submit_of(client, engine, body, RESPONSES)
    assert len(submit.images) == 2
    items = (await client.get(f"{RESPONSES}/{first.json()['id']}/input_items")).json()["data"]
    assert items[0]["content"][0] == {"type": "input_file", "file_data": URL, "pages": "1-2"}


@pytest.mark.parametrize(
    ("fields", "code", "param", "words"),
    [
        ({"pages": "4"}, "invalid_document", "messages[0].content[0]", "has 3"),
        ({"pages": "x"}, "invalid_value", "messages[0].content[0].file.pages", "regex"),
        ({"pages": "1,"}, "invalid_document", "messages[0].content[0]", "'1-3,7'"),
        ({"filename": "\ud800"}, "invalid_value", "messages[0].content[0]", "surrogate"),
        ({"pages": "\ud800"}, "invalid_value", "messages[0].content[0].file.pages", "regex"),
        ({"dpi": 5}, "invalid_value", "messages[0].content[0].file.dpi", ">= 10"),
        ({"max_pixels": 0}, "invalid_value", "messages[0].content[0].file.max_pixels", ">= 1"),
        ({"file_data": "x"}, "invalid_document", "messages[0].content[0]", "truncated"),
        ({"file_data": None}, "invalid_value", "messages[0].content[0].file.file_data", "either"),
        ({"file_data": "data:,"}, "invalid_document", "messages[0].content[0]", ";base64"),
        ({"file_data": "JVBERi0xLjc="}, "invalid_document", "messages[0].content[0]", "damaged"),
        ({"file_data": "/a/b.pdf"}, "invalid_document", "messages[0].content[0]", "a path"),
        ({"file_data": "AAAA"}, "invalid_document", "messages[0].content[0]", "PDF or TIFF"),
    ],
)
async def test_faults_of_documents_are_named(
    client: httpx.AsyncClient, fields: dict[str, Any], code: str, param: str, words: str
) -> None:
    part = {"type": "file", "file": {"file_data": URL, **fields}}
    error = await error_of(client, chat(user(part)))
    assert (error["code"], error["param"]) == (code, param)
    assert words in error["message"]


@pytest.mark.parametrize(
    ("limits", "status", "words"),
    [
        (Limits(max_document_bytes=len(DATA) - 1), 413, "limits.max_document_bytes"),
        (Limits(max_pages=5), 400, "of which at most 2 may be read"),
        (Limits(max_pages=0), 400, "at most 0 pages may be read"),
        (Limits(max_text_bytes=20), 400, "limits.max_text_bytes"),
    ],
)
async def test_documents_keep_limits(
    connect: Connect, limits: Limits, status: int, words: str
) -> None:
    client = connect(Settings(limits=limits))
    error = await error_of(client, chat(user(file(), file(dpi=60))), status)
    assert words in error["message"]


async def test_same_document_twice_counts_its_pages_twice(connect: Connect) -> None:
    client = connect(Settings(limits=Limits(max_pages=5)))
    error = await error_of(client, chat(user(file(), file())))
    assert "have 6 pages; at most 5" in error["message"]


async def test_pages_are_no_images_in_limits_and_log(
    connect: Connect, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(Settings(limits=Limits(max_images=0)))
    with caplog.at_level("INFO", "vlm_server.api"):
        await submit_of(client, engine, chat(user(file(), file(pages="1"))))
    assert "images=0 videos=0 documents=2 pages=4 " in caplog.text


async def test_metrics_count_documents(connect: Connect, engine: ScriptedEngine) -> None:
    client = connect(Settings(document=DocumentSettings(max_cache_bytes=1 << 20)))
    for _ in range(2):
        await submit_of(client, engine, chat(user(file())))
    metrics = (await client.get("/metrics")).text
    values = {
        line.split()[0]: float(line.split()[1])
        for line in metrics.splitlines()
        if "document_" in line and line[0] != "#"
    }
    prefix = "vlm_server_"
    assert values[f"{prefix}document_pages_total"] == 6
    assert values[f"{prefix}cached_document_pages_total"] == 3
    assert values[f"{prefix}document_draw_seconds_total"] > 0
    assert 0 < values[f"{prefix}document_cache_size_bytes"] < 1 << 20
    assert (await client.post("/v1/caches/clear", json={})).status_code == 200
    assert f"{prefix}document_cache_size_bytes 0.0" in (await client.get("/metrics")).text


async def test_usage_tells_pages_pixels_and_tokens(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    use = DocumentUse((1, 3), 3, 250_000, 488)
    done = (lambda request_id: Finished(request_id, Usage(7, 2), documents=(use,)),)
    engine.script = (says("a"), ended(), *done)
    told = {"pages": [1, 3], "num_pages": 3, "pixels": 250_000, "tokens": 488}
    for route, body in bodies(pages="1,3").items():
        usage = (await client.post(route, json=body)).json()["usage"]
        assert usage["documents"] == [told], route
    engine.script = (says("a"), ended(), finished())
    assert "documents" not in (await client.post(ROUTE, json=chat())).json()["usage"]


async def test_documents_are_not_of_every_role(client: httpx.AsyncClient) -> None:
    error = await error_of(client, chat({"role": "system", "content": [file()]}, user("hi")))
    assert error["param"] == "messages[0].content[0]"
    for block in (
        {"role": "assistant", "content": [bodies()[MESSAGES]["messages"][0]["content"][0]]},
    ):
        body = {"model": "demo", "max_tokens": 9, "messages": [user("hi"), block, user("so")]}
        answer = await client.post(MESSAGES, json=body)
        assert answer.status_code == 400, answer.text
        assert "`document` are not allowed in `assistant`" in answer.text
