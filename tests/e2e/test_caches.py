"""Repeated questions about two images get each image's own answer from the caches."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.daemons import Daemon
from tests.support.images import one_shape, user

pytestmark = pytest.mark.e2e

SHAPES = {"circle": "red", "star": "blue"}
IMAGES = {shape: one_shape(shape, color) for shape, color in SHAPES.items()}
NUM_ROUNDS = 3
QUESTIONS = {"What shape is this?": 0, "What colour is it?": 1}


async def ask(daemon: Daemon, shape: str, question: str) -> Any:
    return await daemon.async_client().chat.completions.create(
        model="default",
        messages=[user(IMAGES[shape], question)],
        temperature=0,
        max_tokens=20,
    )


def is_right(answer: Any, shape: str, question: str) -> bool:
    text = (answer.choices[0].message.content or "").strip()
    return bool(text == (shape, SHAPES[shape])[QUESTIONS[question]])


async def test_repeated_images_keep_their_own_answers(daemon: Daemon) -> None:
    cases = [(shape, question) for question in QUESTIONS for shape in SHAPES]
    for case in cases * 2:
        assert is_right(await ask(daemon, *case), *case), case
    answers = await asyncio.gather(*(ask(daemon, *case) for case in cases * NUM_ROUNDS))
    for case, answer in zip(cases * NUM_ROUNDS, answers, strict=True):
        assert is_right(answer, *case), case


async def test_cached_tokens_count_known_prefix(daemon: Daemon) -> None:
    """An image of another size shares no tokens; a repeated one shares all but the last."""
    new = one_shape("square", "green", (392, 448))
    messages = [user(new, "What shape is this?")]
    first, second = [
        await daemon.async_client().chat.completions.create(
            model="default", messages=messages, temperature=0, max_tokens=20
        )
        for _ in range(2)
    ]
    details = [answer.usage.prompt_tokens_details.cached_tokens for answer in (first, second)]
    num_tokens = first.usage.prompt_tokens
    assert details[0] < num_tokens / 2
    assert details[1] == num_tokens - 1
    assert first.choices[0].message.content == second.choices[0].message.content
