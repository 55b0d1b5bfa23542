"""Ollama's client gets OpenAI's tokens in a real daemon, and its options are obeyed."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import jsonschema
import ollama
import pytest

from tests.e2e.test_chat_api import complete
from tests.e2e.test_json_answers import SCHEMA
from tests.support.daemons import Daemon
from tests.support.images import encoded, noise, user

pytestmark = pytest.mark.e2e

GREEDY = {"temperature": 0, "num_predict": 24}


def ask(daemon: Daemon, question: str = "What?", image: Any = None, **fields: Any) -> Any:
    message: dict[str, Any] = {"role": "user", "content": question}
    if image is not None:
        message["images"] = [encoded(image)]
    fields = {"options": GREEDY, **fields}
    return ollama.Client(daemon.url).chat("default", [message], **fields)


def test_ollama_tokens_and_cache_hits_equal_openais(tiny_daemon: Daemon) -> None:
    image = noise(77, (112, 80))
    theirs = complete(tiny_daemon, messages=[user(image, "Which?")])
    ours = ask(tiny_daemon, "Which?", image)
    assert ours.message.content == theirs.choices[0].message.content
    assert ours.done_reason == "length"
    assert ours.prompt_eval_count == theirs.usage.prompt_tokens
    assert ours.eval_count == theirs.usage.completion_tokens == 24
    pieces = [part.message.content for part in ask(tiny_daemon, "Which?", image, stream=True)]
    assert "".join(pieces) == ours.message.content
    image_base64 = base64.b64encode(encoded(image)).decode()
    body = {"model": "default", "prompt": "Which?", "images": [image_base64], "options": GREEDY}
    generated = httpx.post(f"{tiny_daemon.url}/api/generate", json={**body, "stream": False}).json()
    assert generated["response"] == ours.message.content
    assert generated["prompt_eval_cached_count"] == theirs.usage.prompt_tokens - 1


def test_ollama_durations_add_up(tiny_daemon: Daemon) -> None:
    answer = ask(tiny_daemon)
    assert answer.prompt_eval_duration > 0
    assert answer.eval_duration > 0
    total = answer.prompt_eval_duration + answer.eval_duration
    assert abs(total - answer.total_duration) <= 2


def test_ollama_options_are_obeyed(tiny_daemon: Daemon) -> None:
    text = ask(tiny_daemon).message.content
    assert ask(tiny_daemon, options={**GREEDY, "num_predict": 3}).eval_count == 3
    stop = text[4:6]
    answer = ask(tiny_daemon, options={**GREEDY, "stop": stop})
    assert (answer.message.content, answer.done_reason) == (text[: text.index(stop)], "stop")
    for options in ({"top_k": 1}, {"top_p": 0}, {"min_p": 1}):
        drawn = {**GREEDY, "temperature": 1, **options}
        assert ask(tiny_daemon, options=drawn).message.content == text
    seeded = {**GREEDY, "temperature": 1.5, "seed": 5}
    first, again = (ask(tiny_daemon, options=seeded).message.content for _ in "12")
    assert first == again != text
    long = {**GREEDY, "num_predict": 150}
    text = ask(tiny_daemon, options=long).message.content
    for penalty in ("repeat_penalty", "presence_penalty", "frequency_penalty"):
        assert ask(tiny_daemon, options={**long, penalty: 2}).message.content != text


def test_ollama_format_is_enforced(tiny_daemon: Daemon) -> None:
    room = {**GREEDY, "num_predict": 400}
    answer = ask(tiny_daemon, options=room, format=SCHEMA)
    jsonschema.validate(json.loads(answer.message.content), SCHEMA)
