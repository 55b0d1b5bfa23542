"""Token counts, raw prompts and sizes of images, in a real daemon."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.daemons import Daemon
from tests.support.images import noise, user

pytestmark = pytest.mark.e2e


def post(daemon: Daemon, route: str, **body: Any) -> Any:
    answer = httpx.post(f"{daemon.url}{route}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_token_count_equals_answers_usage(tiny_daemon: Daemon) -> None:
    messages = [user(noise(31, (320, 200)), "What?")]
    limits = {"max_pixels": 40_000}
    before = post(tiny_daemon, "/v1/tokenize", messages=messages, mm_processor_kwargs=limits)
    answer = post(
        tiny_daemon,
        "/v1/chat/completions",
        model="default",
        messages=messages,
        mm_processor_kwargs=limits,
        max_tokens=4,
    )
    after = post(tiny_daemon, "/v1/tokenize", messages=messages, mm_processor_kwargs=limits)
    usage = answer["usage"]
    assert before["count"] == after["count"] == usage["prompt_tokens"] == len(before["tokens"])
    assert before["images"] == usage["images"]
    (image,) = before["images"]
    assert image["width"] * image["height"] <= 40_000
    assert before["cached_tokens"] < 20  # how all prompts begin
    assert after["cached_tokens"] == after["count"] - 1
    unlimited = post(tiny_daemon, "/v1/tokenize", messages=messages)
    assert unlimited["count"] > before["count"]


def test_raw_prompt_is_continued(tiny_daemon: Daemon) -> None:
    client = tiny_daemon.client()
    completion = client.completions.create(
        model="default", prompt="a b", max_tokens=5, temperature=0
    )
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 5
    assert completion.choices[0].finish_reason == "length"
    ids = post(tiny_daemon, "/v1/tokenize", prompt="a b")["tokens"]
    assert completion.usage.prompt_tokens == len(ids)
    stream = client.completions.create(
        model="default", prompt=ids, max_tokens=5, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == completion.choices[0].text
