"""Documents sent by the official clients, against the real daemon."""

from __future__ import annotations

import base64
from typing import Any

import anthropic
import openai
import pytest

from tests.clients.chat import user
from tests.support import pdf
from tests.support.daemons import Daemon

READ: Any = "What does it say?"
NUMBERS = pdf.numbered(3)
"""Its pages show 7, 14 and 21."""
GREEDY: Any = {"model": "demo", "temperature": 0}


@pytest.fixture
def client(daemon: Daemon) -> openai.OpenAI:
    return daemon.client()


@pytest.fixture
def messages(daemon: Daemon) -> anthropic.Anthropic:
    key = daemon.client().api_key
    return anthropic.Anthropic(base_url=daemon.url.removesuffix("/v1"), api_key=key)


def file(**fields: Any) -> Any:
    content = {"filename": "numbers.pdf", "file_data": pdf.data_url(NUMBERS), **fields}
    return {"type": "file", "file": content}


def document(data: bytes = NUMBERS, **fields: Any) -> Any:
    encoded = base64.b64encode(data).decode()
    source = {"type": "base64", "media_type": "application/pdf", "data": encoded}
    return {"type": "document", "source": source, **fields}


@pytest.mark.parametrize(("pages", "number"), [("1", "7"), ("2", "14"), ("3", "21")])
def test_openai_chat_reads_page(client: openai.OpenAI, pages: str, number: str) -> None:
    asked = user(file(pages=pages), READ)
    answer = client.chat.completions.create(messages=[asked], **GREEDY)
    assert answer.choices[0].message.content == number
    assert answer.usage is not None
    (use,) = answer.usage.model_dump()["documents"]
    assert (use["pages"], use["num_pages"]) == ([int(pages)], 3)
    assert use["tokens"] < answer.usage.prompt_tokens


def test_openai_responses_read_page(client: openai.OpenAI) -> None:
    part: Any = {"type": "input_file", "file_data": pdf.data_url(NUMBERS), "pages": "2"}
    question: Any = {"role": "user", "content": [part, {"type": "input_text", "text": READ}]}
    first = client.responses.create(input=[question], **GREEDY)
    assert first.output_text == "14"
    second = client.responses.create(input=READ, previous_response_id=first.id, **GREEDY)
    assert second.output_text == "14"
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > 150, "its page is cached"


def test_openai_errors_name_document(client: openai.OpenAI) -> None:
    broken = file(file_data=pdf.data_url(pdf.encrypted()))
    with pytest.raises(openai.BadRequestError, match="encrypted with a password") as error:
        client.chat.completions.create(messages=[user(broken, READ)], **GREEDY)
    assert (error.value.code, error.value.param) == ("invalid_document", "messages[0].content[0]")


@pytest.mark.parametrize("streams", [False, True])
def test_anthropic_message_reads_page(messages: anthropic.Anthropic, streams: bool) -> None:
    content = [document(pages="3"), {"type": "text", "text": READ}]
    fields: Any = {
        "model": "demo",
        "max_tokens": 20,
        "messages": [{"role": "user", "content": content}],
        "extra_body": {"temperature": 0},
    }
    if streams:
        with messages.messages.stream(**fields) as stream:
            message = stream.get_final_message()
    else:
        message = messages.messages.create(**fields)
    assert [block.text for block in message.content if block.type == "text"] == ["21"]


def test_anthropic_counts_tokens_of_pages(messages: anthropic.Anthropic) -> None:
    counts = [
        messages.messages.count_tokens(
            model="demo", messages=[{"role": "user", "content": [document(pages=pages)]}]
        ).input_tokens
        for pages in ("1", "1-2", "1-3")
    ]
    assert 100 < counts[1] - counts[0] == counts[2] - counts[1]
