"""OpenAI's Responses equal chat completions, turn after turn, in a real daemon."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.support.daemons import Daemon
from tests.support.images import noise, user

pytestmark = pytest.mark.e2e


def respond(daemon: Daemon, input: Any, **fields: Any) -> Any:
    fields = {"temperature": 0, "max_output_tokens": 24, **fields}
    return daemon.client().responses.create(model="default", input=input, **fields)


def test_response_equals_chat_completion(tiny_daemon: Daemon) -> None:
    message = user(noise(5, (112, 80)), "What?")
    chat = tiny_daemon.client().chat.completions.create(
        model="default", messages=[message], temperature=0, max_tokens=24
    )
    url = message["content"][0]["image_url"]["url"]
    parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "What?"}]
    response = respond(tiny_daemon, [{"role": "user", "content": parts}])
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.input_tokens_details.cached_tokens == chat.usage.prompt_tokens - 1
    assert response.incomplete_details.reason == "max_output_tokens"

    *_, last = respond(tiny_daemon, [{"role": "user", "content": parts}], stream=True)
    assert last.response.output_text == response.output_text


def test_next_turn_of_response_hits_prefix_cache(tiny_daemon: Daemon) -> None:
    first = respond(tiny_daemon, "Tell me of nine ships.", instructions="Be brief.")
    fields: Any = {"instructions": "Be brief.", "previous_response_id": first.id}
    second = respond(tiny_daemon, "And then?", **fields)
    assert second.usage.input_tokens > first.usage.total_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
    tiny_daemon.client().responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="previous response"):
        respond(tiny_daemon, "And then?", **fields)
