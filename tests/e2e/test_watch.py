"""Watches of drawn pictures, answered by the embedded model, over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.support.daemons import Daemon
from tests.support.image_files import data_url, encoded
from tests.support.images import canvas, draw_shape
from tests.support.watching import watching

pytestmark = pytest.mark.e2e

COLOURS = ["red", "blue", "green", "black"]
QUESTION = {
    "instructions": "What colour is the circle?",
    "criteria": COLOURS,
    "list_options": False,
}
SMALL = {"mm_processor_kwargs": {"max_pixels": 224 * 224}}


def client_of(daemon: Daemon) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=daemon.url, timeout=60, trust_env=False)


def scene(colour: str, *, has_square: bool = False) -> bytes:
    picture = draw_shape(canvas(), "circle", colour, (150, 220), 100)
    if has_square:
        draw_shape(picture, "square", "purple", (370, 370), 40)
    return encoded(picture, "JPEG", quality=90)


@pytest.mark.parametrize(
    "question", [{"questions": {"q": QUESTION}}, {"question": QUESTION["instructions"]}]
)
async def test_events_are_changes_of_answer(daemon: Daemon, question: dict[str, Any]) -> None:
    """A square that comes is asked about, and is no event."""
    async with client_of(daemon) as client, watching(client, **question, **SMALL) as watch:
        for number, colour in enumerate(("red", "blue", "green"), 1):
            await watch.give(scene(colour))
            event = await watch.until("answer", number)
            answer, probability = event["answer"], event["probability"]
            if "questions" in question:
                answer, probability = answer["q"], probability["q"]
            assert answer == colour
            assert probability > 0.9
            await watch.give(scene(colour))  # equal, and not asked about
        await watch.give(scene("green", has_square=True))
        await asyncio.sleep(0.5)
        await watch.give(scene("black", has_square=True))
        last = await watch.until("answer", 4)
        previous = last["previous"]["answer"]
        assert previous in ("green", {"q": "green"})
        await watch.delete()
        end = await watch.until("end")
    assert end["frames"]["received"] == 8
    assert end["frames"]["unchanged"] >= 3
    daemon.wait_idle()
    assert daemon.num_in_flight() == 0


async def test_answer_equals_that_of_decision(daemon: Daemon) -> None:
    """Watched is as alone: the same probabilities."""
    data = scene("blue")
    async with client_of(daemon) as client:
        async with watching(client, questions={"q": QUESTION}) as watch:
            await watch.give(data)
            event = await watch.until("answer")
        body = {"questions": {"q": QUESTION}, "images": [data_url(data, "image/jpeg")]}
        alone = (await client.post("/v1/decisions", json=body)).json()["answers"]["q"]
    assert event["answer"]["q"] == alone["value"]
    assert event["probability"]["q"] == pytest.approx(alone["probabilities"]["blue"], abs=1e-3)


async def test_window_shows_frames_before(daemon: Daemon) -> None:
    async with (
        client_of(daemon) as client,
        watching(client, question="What changed?", window=2) as watch,
    ):
        await watch.give(scene("red"))
        await watch.until("answer")
        await watch.give(scene("blue"))
        event = await watch.until("answer", 2)
    assert "blue" in event["answer"]


async def test_watch_survives_engine(daemon: Daemon) -> None:
    """The engine is killed; the watch says so, and goes on with the next one."""
    async with (
        client_of(daemon) as client,
        watching(client, questions={"q": QUESTION}, **SMALL) as watch,
    ):
        await watch.give(scene("red"))
        await watch.until("answer")
        await asyncio.to_thread(daemon.kill_engine)
        await watch.give(scene("blue"))
        assert (await watch.until("notice"))["code"] in ("engine_unavailable", "engine_died")
        assert (await watch.until("answer", 2))["answer"] == {"q": "blue"}
        assert [e["code"] for e in watch.events if e["type"] == "notice"][-1] == "resumed"
    daemon.wait_ready()
