"""Batches with the official client, against the real daemon."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
import pytest

from tests.clients.screen import COLOUR, screenshot
from tests.support.daemons import USER_KEY, Daemon

ROUTE: Any = "/v1/chat/completions"


@pytest.fixture
def client(daemon: Daemon) -> openai.OpenAI:
    return daemon.client()


def uploaded(client: openai.OpenAI, *bodies: Any, url: str = ROUTE) -> str:
    lines = [
        {"custom_id": str(i), "method": "POST", "url": url, "body": body}
        for i, body in enumerate(bodies)
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    return client.files.create(file=("batch.jsonl", data), purpose="batch").id


def ended(client: openai.OpenAI, batch: Any) -> Any:
    deadline = time.monotonic() + 60
    while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


def results(client: openai.OpenAI, file_id: str | None) -> list[Any]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).iter_lines()]


def asking(content: Any, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": "demo", "temperature": 0, "messages": messages, **fields}


def test_openai_batch_is_created_polled_and_downloaded(client: openai.OpenAI) -> None:
    picture = client.files.create(file=("screen.png", screenshot()), purpose="vision")
    part = {"type": "image_url", "image_url": {"url": picture.id}}
    bodies = [
        asking([part, {"type": "text", "text": COLOUR}]),
        asking("hi", temperature=9),
        asking("hi", max_tokens=1),
    ]
    batch = client.batches.create(
        input_file_id=uploaded(client, *bodies),
        endpoint=ROUTE,
        completion_window="24h",
        metadata={"job": "photos"},
    )
    batch = ended(client, batch)
    assert (batch.status, batch.errors) == ("completed", None)
    assert batch.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}
    output = results(client, batch.output_file_id)
    assert [each["custom_id"] for each in output] == ["0", "2"]
    assert output[0]["response"]["body"]["choices"][0]["message"]["content"] == "red"
    errors = results(client, batch.error_file_id)
    assert errors[0]["response"]["body"]["error"]["param"] == "temperature"
    assert batch.id in [each.id for each in client.batches.list(limit=1)]
    with pytest.raises(openai.NotFoundError):
        client.with_options(api_key=USER_KEY).batches.retrieve(batch.id)


@pytest.mark.parametrize(
    ("url", "body", "text"),
    [
        ("/v1/responses", {"model": "demo", "input": "hi", "max_output_tokens": 16}, "output"),
        ("/v1/completions", {"model": "demo", "prompt": "hi", "max_tokens": 1}, "choices"),
        (
            "/v1/messages",
            {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]},
            "content",
        ),
    ],
)
def test_openai_batch_has_requests_of_dialect(
    client: openai.OpenAI, url: Any, body: Any, text: str
) -> None:
    file_id = uploaded(client, body, url=url)
    batch = client.batches.create(input_file_id=file_id, endpoint=url, completion_window="24h")
    batch = ended(client, batch)
    assert batch.request_counts.completed == 1, batch
    assert text in results(client, batch.output_file_id)[0]["response"]["body"]


def test_openai_batch_with_bad_line_fails_with_its_number(client: openai.OpenAI) -> None:
    file = client.files.create(file=("b.jsonl", b'{"custom_id": 1}\n'), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=ROUTE, completion_window="24h")
    batch = ended(client, batch)
    assert batch.status == "failed"
    assert batch.errors.data[0].line == 1


def test_openai_batch_is_cancelled(client: openai.OpenAI) -> None:
    endless = asking("Count.", max_tokens=7000, ignore_eos=True)
    batch = client.batches.create(
        input_file_id=uploaded(client, *[endless] * 50), endpoint=ROUTE, completion_window="24h"
    )
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(client, batch)
    assert (batch.status, batch.output_file_id) == ("cancelled", None)
