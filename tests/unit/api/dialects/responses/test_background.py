"""OpenAI's client against the real front: responses in the background, and their streams again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from tests.support.waiting import until
from tests.unit.api.conftest import listening
from tests.unit.api.scripted_engine import ScriptedEngine, Step, ended, failed, finished
from tests.unit.api.scripted_engine import text as says
from vlm_server.protocol import OnDevice
from vlm_server.settings import Server, Settings

KEYS = ("correct-horse-battery", "another-horse-battery")
SECONDS = 0.2
"""The time for which events are kept, in tests of their end."""


def begins() -> Step:
    return lambda request_id: OnDevice((request_id,))


def gated(*gates: asyncio.Event) -> tuple[Step, ...]:
    """An answer that waits at each gate: before the device begins, and between two words."""
    first, second = gates
    return (first, begins(), says("one "), second, says("two"), ended(), finished())


@pytest.fixture
def gates() -> tuple[asyncio.Event, asyncio.Event]:
    return asyncio.Event(), asyncio.Event()


@pytest.fixture
async def base_url(
    engine: ScriptedEngine, gates: tuple[asyncio.Event, asyncio.Event]
) -> AsyncIterator[str]:
    engine.script = gated(*gates)
    async with listening(engine, Settings(server=Server(api_keys=KEYS))) as port:
        yield f"http://127.0.0.1:{port}/v1"


@pytest.fixture
async def client(base_url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=base_url, api_key=KEYS[0], max_retries=0) as sdk:
        yield sdk


@pytest.fixture
async def brief_client(engine: ScriptedEngine) -> AsyncIterator[AsyncOpenAI]:
    """A client of a front that keeps events for `SECONDS`."""
    settings = Settings(server=Server(stream_resume_keep_seconds=SECONDS))
    async with listening(engine, settings) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as sdk:
            yield sdk


async def created(client: AsyncOpenAI, **fields: Any) -> Any:
    return await client.responses.create(model="demo", input="Hi", background=True, **fields)


async def polled(client: AsyncOpenAI, response_id: str, status: str) -> Any:
    """The response, once it has that status."""
    for _ in range(500):
        response = await client.responses.retrieve(response_id)
        if response.status == status:
            return response
        await asyncio.sleep(0.01)
    raise AssertionError(f"still {response.status}")


async def events_after(client: AsyncOpenAI, response_id: str, number: int) -> list[Any]:
    stream = await client.responses.retrieve(response_id, stream=True, starting_after=number)
    return [event async for event in stream]


async def test_background_response_is_queued_runs_and_completes(
    client: AsyncOpenAI, gates: tuple[asyncio.Event, asyncio.Event]
) -> None:
    response = await created(client)
    assert (response.status, response.background, response.output) == ("queued", True, [])
    assert (await client.responses.retrieve(response.id)).status == "queued"
    gates[0].set()
    await polled(client, response.id, "in_progress")
    gates[1].set()
    answered = await polled(client, response.id, "completed")
    assert answered.output_text == "one two"
    later = await client.responses.create(
        model="demo", input="Go on", previous_response_id=response.id
    )
    assert later.status == "completed"


async def test_background_response_cut_by_its_limit_is_incomplete(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    engine.script = (says("one "), ended("length"), finished())
    response = await created(client)
    assert (await polled(client, response.id, "incomplete")).output_text == "one "


async def test_failed_background_response_stays_with_its_error(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    engine.script = (says("one "), failed("engine_died", "The engine ended."))
    response = await created(client)
    lost = await polled(client, response.id, "failed")
    assert lost.error.message == "The engine ended."
    assert lost.output_text == "one "
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="demo", input="2", previous_response_id=response.id)
    assert caught.value.code == "previous_response_not_found"


async def test_cut_background_stream_resumes_at_each_event(
    client: AsyncOpenAI, gates: tuple[asyncio.Event, asyncio.Event]
) -> None:
    gates[0].set()
    stream = await created(client, stream=True)
    first = await anext(stream)
    assert (first.type, first.response.status) == ("response.created", "queued")
    await stream.close()
    gates[1].set()
    await polled(client, first.response.id, "completed")
    events = [first, *await events_after(client, first.response.id, 0)]
    assert [event.type for event in events[1:3]] == ["response.queued", "response.in_progress"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "one two"
    for number in range(len(events)):
        assert await events_after(client, first.response.id, number) == events[number + 1 :]


async def test_two_readers_of_running_response_get_same_events(
    client: AsyncOpenAI, gates: tuple[asyncio.Event, asyncio.Event]
) -> None:
    response = await created(client)
    gates[0].set()
    await polled(client, response.id, "in_progress")
    readers = [asyncio.create_task(events_after(client, response.id, 1)) for _ in range(2)]
    await asyncio.sleep(0.05)
    gates[1].set()
    one, other = await asyncio.gather(*readers)
    assert one == other
    assert [event.type for event in one].count("response.completed") == 1


async def test_stream_of_failed_response_ends_with_its_error(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    engine.script = (says("one "), failed("engine_died", "The engine ended."))
    response = await created(client)
    await polled(client, response.id, "failed")
    for number in (0, 4):
        with pytest.raises(openai.APIError, match="The engine ended"):
            await events_after(client, response.id, number)


async def test_cancelled_response_aborts_and_ends_its_stream(
    client: AsyncOpenAI, engine: ScriptedEngine, gates: tuple[asyncio.Event, asyncio.Event]
) -> None:
    gates[0].set()
    stream = await created(client, stream=True)
    events = [await anext(stream) for _ in range(6)]
    assert events[-1].type == "response.output_text.delta"
    response_id = events[0].response.id
    cancelled = await client.responses.cancel(response_id)
    assert (cancelled.status, cancelled.output_text) == ("cancelled", "one ")
    rest = [event async for event in stream]
    assert (rest[-1].type, rest[-1].response.status) == ("response.incomplete", "cancelled")
    numbers = [event.sequence_number for event in events + rest]
    assert numbers == list(range(len(numbers)))
    await asyncio.wait_for(engine.closed.wait(), 1)
    assert engine.aborted == [response_id]
    assert await client.responses.cancel(response_id) == cancelled
    assert await client.responses.retrieve(response_id) == cancelled


async def test_cancelling_completed_response_changes_nothing(
    brief_client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    engine.script = (says("one"), ended(), finished())
    response = await created(brief_client)
    answered = await polled(brief_client, response.id, "completed")
    assert await brief_client.responses.cancel(response.id) == answered
    await asyncio.sleep(2 * SECONDS)  # its events are gone
    assert await brief_client.responses.cancel(response.id) == answered


async def test_deleted_background_response_is_cancelled(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    response = await created(client)
    await until(engine.waiting.is_set, 1)
    await client.responses.delete(response.id)
    await asyncio.wait_for(engine.closed.wait(), 1)
    assert engine.aborted == [response.id]
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)


@pytest.mark.parametrize(
    ("number", "status"),
    [("-1", 400), ("1e3", 400), ("x", 400), ("99999999999999999999", 400), ("100", 400), ("", 400)],
)
async def test_impossible_starting_points_are_refused(
    client: AsyncOpenAI, base_url: str, number: str, status: int
) -> None:
    response = await created(client)
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEYS[0]}"}) as http:
        query = f"stream=true&starting_after={number}"
        answer = await http.get(f"{base_url}/responses/{response.id}?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, "starting_after")


async def test_stream_of_another_key_is_not_found(client: AsyncOpenAI, base_url: str) -> None:
    response = await created(client)
    async with AsyncOpenAI(base_url=base_url, api_key=KEYS[1], max_retries=0) as other:
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(response.id, stream=True, starting_after=0)
        with pytest.raises(openai.NotFoundError):
            await other.responses.cancel(response.id)
    assert (await client.responses.retrieve(response.id)).status == "queued"


async def test_stream_is_gone_after_its_time(
    brief_client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    engine.script = (says("one"), ended(), finished())
    response = await created(brief_client)
    await polled(brief_client, response.id, "completed")
    await asyncio.sleep(2 * SECONDS)
    with pytest.raises(openai.BadRequestError, match="stream_resume_keep_seconds"):
        await brief_client.responses.retrieve(response.id, stream=True, starting_after=0)
    assert (await brief_client.responses.retrieve(response.id)).output_text == "one"


async def test_response_that_is_not_in_background_is_not_streamed_again(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    engine.script = (says("one"), ended(), finished())
    response = await client.responses.create(model="demo", input="Hi")
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.retrieve(response.id, stream=True)


async def test_background_response_without_room_is_refused(engine: ScriptedEngine) -> None:
    settings = Settings(server=Server(max_responses_bytes=0))
    async with listening(engine, settings) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            with pytest.raises(openai.ConflictError, match="max_responses_bytes"):
                await created(client)
    assert engine.submitted == []
