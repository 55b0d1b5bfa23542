"""Watches over a real socket, with a scripted engine: events, frames, ends, and refusals."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.support.image_files import encoded
from tests.support.images import noise
from tests.support.watching import Watching, plain, watching
from tests.unit.api.conftest import Connect, listening
from tests.unit.api.scripted_engine import (
    ScriptedEngine,
    Step,
    ended,
    ends_with,
    failed,
    finished,
    never,
    scored,
)
from vlm_server.errors import EngineUnavailable, RequestTooCostly
from vlm_server.protocol import (
    Decision,
    Finished,
    ImagePart,
    TextPart,
    TokenLogprob,
    TokenText,
    Usage,
)
from vlm_server.settings import Limits, Server, Settings, WatchSettings

COLOURS = ("red", "green", "blue", "black", "white", "yellow")
KEYS = ("key-of-one-client", "key-of-another-client")


@asynccontextmanager
async def serving(engine: ScriptedEngine, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    wanted = Settings(watch=WatchSettings(**settings))
    async with listening(engine, wanted) as port, client_of(port) as client:
        yield client


def client_of(port: int, key: str = "") -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = f"http://127.0.0.1:{port}"
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=30, trust_env=False)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def says(word: str, *logprobs: float) -> tuple[Step, ...]:
    entries = [TokenLogprob(TokenText("x", logprob), ()) for logprob in logprobs]
    return scored(word, *entries), ended(), finished()


def decides(*logprobs: float) -> tuple[Step, ...]:
    decision = Decision(logprobs, 0)
    return (lambda name: Finished(name, Usage(7, 0, 3), decisions=(decision,)),)


def without_times(event: dict[str, Any]) -> dict[str, Any]:
    """`event` with the number of its frame alone."""
    previous = event.get("previous")
    before = previous and without_times(previous)
    return {**event, "frame": event["frame"]["number"]} | (
        {"previous": before} if "previous" in event else {}
    )


async def test_events_come_when_answer_changes_with_both_answers() -> None:
    engine = ScriptedEngine(*says("red ", math.log(0.5), math.log(0.5)))
    async with serving(engine) as client, watching(client, question="What?") as watch:
        await watch.give(plain("red"), time=10.5)
        first = await watch.until("answer")
        assert first == {
            "type": "answer",
            "frame": {"number": 1, "time": 10.5},
            "answer": "red",
            "probability": pytest.approx(0.25),
            "finish_reason": "stop",
            "previous": None,
            "skipped": 0,
        }
        await watch.give(plain("green"))  # the same answer: no event
        await until(lambda: len(engine.submitted) == 2)
        engine.script = says("blue")
        await watch.give(plain("blue"))
        second = without_times(await watch.until("answer", 2))
        assert (second["answer"], second["frame"], second["probability"]) == ("blue", 3, 1.0)
        assert second["previous"]["answer"] == "red"
        assert second["previous"]["frame"] == 1
        assert (await watch.delete()).json()["deleted"] is True
        end = await watch.until("end")
        assert (end["reason"], end["error"]) == ("deleted", None)
        assert end["frames"] == {
            "received": 3,
            "asked": 3,
            "unchanged": 0,
            "skipped": 0,
            "failed": 0,
        }
        assert (await watch.delete()).status_code == 404
    assert [event["type"] for event in watch.events].count("end") == 1


async def test_decisions_are_compared_by_question() -> None:
    engine = ScriptedEngine(*decides(math.log(0.9), math.log(0.1)))
    question = {"instructions": "Which?", "criteria": ["a", "b"]}
    async with serving(engine) as client, watching(client, questions={"q": question}) as watch:
        await watch.give(plain("red"))
        first = await watch.until("answer")
        assert first["answer"] == {"q": "a"}
        assert first["probability"] == {"q": pytest.approx(0.9)}
        engine.script = decides(math.log(0.2), math.log(0.8))
        await watch.give(plain("blue"))
        assert (await watch.until("answer", 2))["answer"] == {"q": "b"}
    (first_submit, _) = engine.submitted
    assert first_submit.pooling is not None
    assert first_submit.inputs[0].options == ("a", "b")
    assert first_submit.messages[-1].content == (ImagePart(0),)


@pytest.mark.parametrize(
    ("question", "logprobs", "answer", "probability"),
    [
        ({"type": "bool"}, (0.3, 0.1, 0.4, 0.2), False, 0.6),
        ({"type": "score", "criteria": ["low", "high"]}, (0.2, 0.8), 1, 0.8),
    ],
)
async def test_answers_of_each_type_have_their_probability(
    question: dict[str, Any], logprobs: tuple[float, ...], answer: Any, probability: float
) -> None:
    engine = ScriptedEngine(*decides(*map(math.log, logprobs)))
    asked = {"q": {"instructions": "?", **question}}
    async with serving(engine) as client, watching(client, questions=asked) as watch:
        await watch.give(plain("red"))
        event = await watch.until("answer")
    assert event["answer"] == {"q": answer}
    assert event["probability"] == {"q": pytest.approx(probability)}


async def test_unsure_answers_are_not_reported() -> None:
    engine = ScriptedEngine(*decides(math.log(0.6), math.log(0.4)))
    body = {"questions": {"q": {"instructions": "?", "criteria": ["a", "b"]}}}
    async with (
        serving(engine) as client,
        watching(client, min_probability=0.7, **body) as watch,
    ):
        await watch.give(plain("red"))
        await until(lambda: len(engine.submitted) == 1)
        engine.script = decides(math.log(0.2), math.log(0.8))
        await asyncio.sleep(0.05)
        await watch.give(plain("blue"))
        event = await watch.until("answer")
    assert (event["answer"], event["previous"]) == ({"q": "b"}, None)


async def test_json_answers_are_compared_as_values() -> None:
    engine = ScriptedEngine(*says('{"a": 1, "b": 2}'))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    named = {"name": "n", "schema": schema}
    body = {
        "question": "?",
        "response_format": {"type": "json_schema", "json_schema": named},
        "max_tokens": 9,
    }
    async with serving(engine) as client, watching(client, **body) as watch:
        await watch.give(plain("red"))
        assert (await watch.until("answer"))["answer"] == {"a": 1, "b": 2}
        engine.script = says('{"b":2,"a":1}')
        await watch.give(plain("blue"))
        await until(lambda: len(engine.submitted) == 2)
        await watch.delete()
        await watch.until("end")
    assert len(watch.events) == 3
    sampling = engine.submitted[0].sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.logprobs) == (0.0, 9, 0)
    assert sampling.json_schema is not None


async def test_equal_and_similar_frames_are_dropped_and_window_rolls() -> None:
    engine = ScriptedEngine(*says("x"))
    body = {
        "question": "What changed?",
        "window": 2,
        "instructions": "Long text.",
        "mm_processor_kwargs": {"max_pixels": 5000},
    }
    async with serving(engine) as client, watching(client, **body) as watch:
        for number, colour in enumerate(("red", "red", "#f90404", "blue", "green"), 1):
            taken = await watch.give(plain(colour))
            assert taken["frame"]["number"] == number
            assert (taken["change"] > 0) == (colour not in ("#f90404",) and number != 2)
            await asyncio.sleep(0.1)
        await watch.delete()
        end = await watch.until("end")
    assert end["frames"]["unchanged"] == 2
    assert [len(submit.images) for submit in engine.submitted] == [1, 2, 2]
    first, second, third = engine.submitted
    assert second.images[1].data == third.images[0].data
    assert first.messages[0].role == "system"
    assert third.messages[1].content == (ImagePart(0), ImagePart(1), TextPart("What changed?"))
    assert first.images[0].max_pixels == 5000
    assert first.client.endswith(" watch")


async def test_slow_device_skips_frames_and_says_how_many() -> None:
    waits = never()
    engine = ScriptedEngine(waits, *says("one"))
    async with serving(engine) as client, watching(client, question="?") as watch:
        await watch.give(plain("red"))
        await engine.waiting.wait()
        for colour in COLOURS[1:]:
            await watch.give(plain(colour))
        engine.script = says("two")
        assert isinstance(waits, asyncio.Event)
        waits.set()
        second = await watch.until("answer", 2)
    assert without_times(second)["frame"] == len(COLOURS)
    assert second["skipped"] == len(COLOURS) - 2
    assert len(engine.submitted) == 2


async def test_engine_that_is_away_is_waited_for_and_said() -> None:
    engine = ScriptedEngine(*says("x"))
    engine.refusal = EngineUnavailable("The engine is not ready.")
    async with serving(engine) as client, watching(client, question="?") as watch:
        await watch.give(plain("red"))
        notice = await watch.until("notice")
        assert notice["code"] == "engine_unavailable"
        await asyncio.sleep(0.6)
        engine.refusal = None
        engine.script = (failed("engine_died", "The engine process ended."),)
        assert (await watch.until("notice", 2))["code"] == "engine_died"
        engine.script = says("x")
        assert (await watch.until("notice", 3))["code"] == "resumed"
        await watch.until("answer")
        await watch.delete()
        await watch.until("end")
    kinds = [event["type"] for event in watch.events]
    assert kinds == ["started", "notice", "notice", "notice", "answer", "end"]


async def test_frame_at_fault_is_left_out_and_watch_goes_on() -> None:
    engine = ScriptedEngine(failed("invalid_image", "the image can't be decoded"))
    async with serving(engine) as client, watching(client, question="?") as watch:
        await watch.give(plain("red"))
        assert (await watch.until("notice"))["code"] == "invalid_image"
        engine.refusal = RequestTooCostly("Engines crashed on its size.")
        await watch.give(plain("green"))
        assert (await watch.until("notice", 2))["code"] == "request_too_costly"
        engine.refusal, engine.script = None, says("x")
        await watch.give(plain("blue"))
        await watch.until("answer")
        await watch.delete()
        assert (await watch.until("end"))["frames"]["failed"] == 2


async def test_question_at_fault_ends_watch_with_error() -> None:
    engine = ScriptedEngine(failed("context_length_exceeded", "The prompt is too long."))
    async with serving(engine) as client, watching(client, question="?") as watch:
        await watch.give(plain("red"))
        end = await watch.until("end")
        assert end["reason"] == "failed"
        assert end["error"]["code"] == "context_length_exceeded"
        assert (await watch.frame(plain("red"))).status_code == 404


async def test_idle_watch_ends_and_frames_keep_it() -> None:
    engine = ScriptedEngine(*says("x"))
    async with (
        serving(engine, idle_timeout_seconds=2.5) as client,
        watching(client, question="?") as watch,
    ):
        for _ in range(4):
            await asyncio.sleep(1)
            await watch.give(plain("red"))
        assert (await watch.until("end"))["reason"] == "idle"


async def test_client_that_leaves_ends_its_watch() -> None:
    engine = ScriptedEngine(never())
    async with serving(engine) as client:
        async with watching(client, question="?") as watch:
            await watch.give(plain("red"))
            await engine.waiting.wait()
        async with asyncio.timeout(5):
            await engine.closed.wait()
        assert (await watch.frame(plain("red"))).status_code == 404
        metrics = (await client.get("/metrics")).text
    assert "vlm_server_watches 0.0" in metrics
    assert "vlm_server_watches_size_bytes 0.0" in metrics
    assert "vlm_server_requests_in_flight 0.0" in metrics
    assert len(engine.aborted) == 1


async def test_numbers_of_watches_and_frame_rate_are_bounded() -> None:
    engine = ScriptedEngine(*says("x"))
    limits = {"max_watches": 3, "max_watches_per_key": 2, "max_frames_per_second": 0.1}
    async with serving(engine, **limits) as client, watching(client, question="?") as watch:
        async with watching(client, question="?"):
            refused = await client.post("/v1/watch", json={"question": "?"})
            assert refused.status_code == 429
            assert "max_watches_per_key" in refused.json()["error"]["message"]
        async with asyncio.timeout(10):  # until the place is free again
            while (await client.get("/metrics")).text.count("vlm_server_watches 1.0") == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        async with watching(client, question="?"):
            pass
        codes = [(await watch.frame(plain("red"))).status_code for _ in range(4)]
        assert codes == [200, 429, 429, 429]


async def test_bytes_of_frames_are_bounded() -> None:
    engine = ScriptedEngine(never())
    frames = [encoded(noise(seed, (64, 64)), "BMP") for seed in range(3)]
    async with (
        serving(engine, max_bytes=2 * len(frames[0])) as client,
        watching(client, question="?", window=4) as watch,
    ):
        codes = [(await watch.frame(frame)).status_code for frame in frames]
        assert codes == [200, 200, 429]


async def test_foreign_keys_neither_feed_nor_end_watch() -> None:
    engine = ScriptedEngine(*says("x"))
    async with (
        listening(engine, Settings(server=Server(api_keys=KEYS))) as port,
        client_of(port, KEYS[0]) as one,
        client_of(port, KEYS[1]) as other,
        watching(one, question="?") as watch,
    ):
        foreign = Watching(other)
        foreign.events = watch.events
        assert (await foreign.frame(plain("red"))).status_code == 404
        assert (await foreign.delete()).status_code == 404
        await watch.give(plain("red"))


BAD_BODIES: list[tuple[dict[str, Any], str]] = [
    ({}, "question"),
    ({"question": "?", "questions": {"q": {"instructions": "?", "type": "bool"}}}, "question"),
    ({"question": " "}, "question"),
    ({"question": "?", "window": 0}, "window"),
    ({"question": "?", "window": 17}, "window"),
    ({"question": "?", "min_change": 1.5}, "min_change"),
    ({"question": "?", "pixel_change": 256}, "pixel_change"),
    ({"question": "?", "interval_seconds": -1}, "interval_seconds"),
    ({"question": "?", "colour": 1}, "colour"),
    ({"question": "x" * 5_000}, "question"),
    ({"questions": {}}, "questions"),
    ({"questions": {"q": {"instructions": "?", "criteria": ["a"]}}}, "questions.q.criteria"),
    (
        {"questions": {"q": {"instructions": "?", "type": "ranking", "criteria": ["a", "b"]}}},
        "questions.q.type",
    ),
    (
        {"questions": {"q": {"instructions": "?", "type": "bool"}}, "max_tokens": 5},
        "max_tokens",
    ),
    ({"question": "?", "mm_processor_kwargs": {"min_pixels": 9, "max_pixels": 8}}, "min_pixels"),
]


@pytest.mark.parametrize(("body", "param"), BAD_BODIES)
async def test_wrong_bodies_are_refused_by_field(
    connect: Connect, body: dict[str, Any], param: str
) -> None:
    client = connect(Settings(limits=Limits(max_text_bytes=1000)))
    response = await client.post("/v1/watch", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].endswith(param)


async def test_unknown_model_and_large_body_are_refused(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/watch", json={"question": "?", "model": "other"})
    assert response.status_code == 404
    assert (await client.post("/v1/watch", json={"question": "?" * 600_000})).status_code == 413


async def test_bad_frames_are_refused_and_watch_goes_on() -> None:
    engine = ScriptedEngine(ends_with("x"), finished())
    async with serving(engine) as client, watching(client, question="?") as watch:
        path = f"/v1/watch/{watch.id}/frames"
        for content, kind, query, status in (
            (b"", "image/jpeg", "", 400),
            (b"no picture", "image/png", "", 400),
            (plain("red")[:200], "image/jpeg", "", 400),
            (plain("red"), "text/plain", "", 415),
            (plain("red"), "image/jpeg", "?time=soon", 400),
            (plain("red"), "image/jpeg", "?time=nan", 400),
        ):
            answer = await client.post(
                path + query, content=content, headers={"Content-Type": kind}
            )
            assert answer.status_code == status, (kind, query, answer.text)
        await watch.give(plain("red"))
        await watch.until("answer")
