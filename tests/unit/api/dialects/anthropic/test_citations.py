"""Citations of pages in Anthropic's answers, whole and streamed."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest

from tests.support import pdf
from tests.unit.api.dialects.anthropic.steps import ROUTE, request
from tests.unit.api.dialects.anthropic.test_events import events_of
from tests.unit.api.requests import text, user
from tests.unit.api.scripted_engine import ScriptedEngine, ended, finished
from tests.unit.api.scripted_engine import text as says
from vlm_server.protocol import TextPart

Block = dict[str, Any]


def document(**fields: Any) -> Block:
    data = base64.b64encode(pdf.numbered(4)).decode()
    source = {"type": "base64", "media_type": "application/pdf", "data": data}
    return {"type": "document", "source": source, "citations": {"enabled": True}, **fields}


def location(first: int, last: int, index: int = 0, title: str | None = None) -> Block:
    return {
        "type": "page_location",
        "cited_text": "",
        "document_index": index,
        "document_title": title,
        "start_page_number": first,
        "end_page_number": last + 1,
    }


async def both_answers(
    client: httpx.AsyncClient, engine: ScriptedEngine, pieces: list[str], *blocks: Block
) -> list[Block]:
    """The content of an answer in `pieces`, which must be the same whole and streamed."""
    engine.script = (*map(says, pieces), ended(), finished())
    body = request(user(*blocks, text()))
    whole = await client.post(ROUTE, json=body)
    assert whole.status_code == 200, whole.text
    streamed: list[Block] = []
    for event in events_of(await client.post(ROUTE, json={**body, "stream": True})):
        if event["type"] == "content_block_start":
            assert event["index"] == len(streamed)
            streamed.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "citations_delta":
                streamed[event["index"]].setdefault("citations", []).append(delta["citation"])
            else:
                streamed[event["index"]]["text"] += delta["text"]
    content: list[Block] = whole.json()["content"]
    assert streamed == content
    return content


async def test_marks_of_shown_pages_become_citations(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    pieces = ["It is 7 [pa", "ge 2", "]. And", " 9 [Pages 3-4] [document 2, page 1], so", " it is."]
    content = await both_answers(client, engine, pieces, document(title="A"), document())
    assert content == [
        {"type": "text", "text": "It is 7 ", "citations": [location(2, 2, title="A")]},
        {"type": "text", "text": ". And 9 ", "citations": [location(3, 4, title="A")]},
        {"type": "text", "text": " ", "citations": [location(1, 1, index=1)]},
        {"type": "text", "text": ", so it is."},
    ]


@pytest.mark.parametrize(
    "answer",
    [
        *("[page 5]", "[page 0]", "[pages 2-1]", "[page 1-9]", "[document 3, page 1]", "[page"),
        *(
            "[pages 1, 2]",
            "page 1",
            "[[page 1",
            "[1]",
            "[ page 1 ]",
            "x[" * 50,
            "[page " + "1" * 60,
        ),
    ],
)
async def test_brackets_without_shown_pages_stay_text(
    client: httpx.AsyncClient, engine: ScriptedEngine, answer: str
) -> None:
    content = await both_answers(client, engine, list(answer), document())
    assert content == [{"type": "text", "text": answer}]


async def test_pages_that_were_left_out_are_not_cited(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    content = await both_answers(client, engine, ["A [page 1]", "[page 3]"], document(pages="3"))
    assert content == [{"type": "text", "text": "A [page 1]", "citations": [location(3, 3)]}]


async def test_documents_without_citations_enabled_are_not_cited(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    plain = {"type": "document", "source": {"type": "text", "data": "x"}}
    silent = document(citations={"enabled": False})
    pieces = ["A [page 1] [document 2, page 1] [document 3, page 1]"]
    content = await both_answers(client, engine, pieces, plain, silent, document())
    assert content == [
        {
            "type": "text",
            "text": "A [page 1] [document 2, page 1] ",
            "citations": [location(1, 1, index=2)],
        }
    ]
    instructions = [
        part.text
        for part in engine.submitted[-1].messages[-1].content
        if isinstance(part, TextPart) and "brackets" in part.text
    ]
    assert len(instructions) == 1
    assert "[document 3, page 3]" in instructions[0]


async def test_reasoning_and_calls_come_after_held_text(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (says("A [page"), ended(), finished())
    events = events_of(
        await client.post(ROUTE, json={**request(user(document(), text())), "stream": True})
    )
    texts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(texts) == "A [page"
    assert [event["type"] for event in events][-3:] == [
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
