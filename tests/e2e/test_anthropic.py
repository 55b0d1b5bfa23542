"""Anthropic's client gets the same true answers as OpenAI's from the embedded model."""

from __future__ import annotations

import base64
from typing import Any

import anthropic
import pytest

from tests.support.daemons import Daemon
from tests.support.images import encoded, one_shape, user

pytestmark = pytest.mark.e2e

QUESTION = "What shape is this?"


def question(image: Any) -> list[Any]:
    data = base64.b64encode(encoded(image)).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": content}]


def ask(daemon: Daemon, image: Any, **fields: Any) -> anthropic.types.Message:
    client = anthropic.Anthropic(base_url=daemon.url, api_key="none")
    more = {"extra_body": {"temperature": 0}, **fields}
    return client.messages.create(model="default", max_tokens=20, messages=question(image), **more)


def test_anthropic_answer_and_usage_equal_openais(daemon: Daemon) -> None:
    image = one_shape("star", "green", (392, 336))
    other = daemon.client().chat.completions.create(
        model="default", messages=[user(image, QUESTION)], temperature=0, max_tokens=20
    )
    message = ask(daemon, image)
    (block,) = message.content
    assert block.type == "text"
    assert block.text.strip() == "star"
    assert block.text == other.choices[0].message.content
    assert message.stop_reason == "end_turn"
    usage = message.usage
    assert other.usage is not None
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == other.usage.prompt_tokens
    assert usage.input_tokens == 1, "both dialects make the same prompt, so all else is cached"
    assert usage.output_tokens == other.usage.completion_tokens


def test_anthropic_stream_ends_at_stop_sequence(daemon: Daemon) -> None:
    client = anthropic.Anthropic(base_url=daemon.url, api_key="none")
    with client.messages.stream(
        model="default",
        max_tokens=20,
        messages=question(one_shape("circle", "red")),
        stop_sequences=["never", "cle"],
        extra_body={"temperature": 0},
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text.strip() == "cir"
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "cle")
