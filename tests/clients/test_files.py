"""Uploaded files with the official clients, against the real daemon."""

from __future__ import annotations

import io
from typing import Any

import anthropic
import openai
import pytest

from tests.clients.screen import COLOUR, screenshot
from tests.support.daemons import USER_KEY, Daemon

GREEDY: Any = {"model": "demo", "temperature": 0}
PICTURE = screenshot()


@pytest.fixture
def client(daemon: Daemon) -> openai.OpenAI:
    return daemon.client()


@pytest.fixture
def anthropic_client(daemon: Daemon) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=daemon.url, api_key=daemon.api_key, max_retries=0)


def named(file_id: str) -> Any:
    return {"type": "image_url", "image_url": {"url": file_id}}


def filed(file_id: str) -> Any:
    return {"type": "file", "file": {"file_id": file_id}}


def asked(client: openai.OpenAI, part: Any) -> str | None:
    content = [part, {"type": "text", "text": COLOUR}]
    answer = client.chat.completions.create(
        messages=[{"role": "user", "content": content}], **GREEDY
    )
    return answer.choices[0].message.content


def test_openai_file_is_uploaded_used_listed_and_deleted(client: openai.OpenAI) -> None:
    file = client.files.create(file=("screen.png", PICTURE), purpose="vision")
    assert (file.bytes, file.filename, file.purpose) == (len(PICTURE), "screen.png", "vision")
    assert asked(client, named(file.id)) == asked(client, filed(file.id)) == "red"
    item: Any = {
        "role": "user",
        "content": [
            {"type": "input_image", "file_id": file.id, "detail": "auto"},
            {"type": "input_text", "text": COLOUR},
        ],
    }
    response = client.responses.create(input=[item], **GREEDY)
    assert response.output_text == "red"
    assert file.id in [
        each.id for each in client.files.list(purpose="vision", limit=1, order="desc")
    ]
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == PICTURE
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    with pytest.raises(openai.BadRequestError) as caught:
        asked(client, named(file.id))
    assert (caught.value.code, caught.value.param) == ("file_not_found", "messages[0].content[0]")


def test_openai_file_may_expire(client: openai.OpenAI) -> None:
    file = client.files.create(
        file=io.BytesIO(b'{"custom_id": "1"}\n'),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert file.expires_at == file.created_at + 3600
    client.files.delete(file.id)


def test_openai_pages_have_all_files(client: openai.OpenAI) -> None:
    ids = {client.files.create(file=b"%d" % i, purpose="user_data").id for i in range(5)}
    assert {file.id for file in client.files.list(purpose="user_data", limit=2)} == ids
    for file_id in ids:
        client.files.delete(file_id)


def test_anthropic_file_is_uploaded_used_listed_and_deleted(
    anthropic_client: anthropic.Anthropic,
) -> None:
    files = anthropic_client.beta.files
    file = files.upload(file=("screen.png", PICTURE, "image/png"))
    assert (file.size_bytes, file.mime_type, file.type) == (len(PICTURE), "image/png", "file")
    source: Any = {"type": "image", "source": {"type": "file", "file_id": file.id}}
    content: Any = [source, {"type": "text", "text": COLOUR}]
    message = anthropic_client.beta.messages.create(
        model="demo",
        max_tokens=20,
        messages=[{"role": "user", "content": content}],
        betas=["files-api-2025-04-14"],
        extra_body={"temperature": 0},
    )
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "red"}]
    assert file.id in [each.id for each in files.list(limit=1)]
    assert files.retrieve_metadata(file.id) == file
    assert files.download(file.id).read() == PICTURE
    assert files.delete(file.id).type == "file_deleted"
    with pytest.raises(anthropic.NotFoundError):
        files.retrieve_metadata(file.id)


def test_dialects_share_files(client: openai.OpenAI, anthropic_client: anthropic.Anthropic) -> None:
    file = anthropic_client.beta.files.upload(file=("screen.png", PICTURE))
    assert client.files.retrieve(file.id).purpose == "user_data"
    assert asked(client, filed(file.id)) == "red"
    client.files.delete(file.id)


def test_key_does_not_see_files_of_another(daemon: Daemon, client: openai.OpenAI) -> None:
    file = client.files.create(file=("screen.png", PICTURE), purpose="vision")
    other = daemon.client(api_key=USER_KEY)
    assert file.id not in [each.id for each in other.files.list()]
    with pytest.raises(openai.NotFoundError):
        other.files.content(file.id)
    with pytest.raises(openai.BadRequestError):
        asked(other, named(file.id))
    client.files.delete(file.id)
