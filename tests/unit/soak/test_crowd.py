"""A crowd varies its number of users, ends with none, and keeps their conversations."""

from __future__ import annotations

import asyncio
import json
import time

from tests.soak.crowd import Crowd
from tests.soak.request import Ending, Kind, Outcome, Request


class FakeClient:
    """Stands in for the soak client: answers after a moment, and counts requests."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.running = self.max_running = 0

    async def send(self, request: Request) -> Outcome:
        self.requests.append(request)
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        await asyncio.sleep(0.002)
        self.running -= 1
        return Outcome(kind=request.kind, ending=Ending.ANSWERED, status=200, text="well")


def quick_crowd(client: FakeClient, most: int) -> Crowd:
    """A crowd whose size changes every few hundredths of a second."""
    return Crowd(client.send, 5, most, stage_seconds=(0.02, 0.05), poll_seconds=0.002)


async def test_crowd_size_varies_and_ends_at_zero():
    client = FakeClient()
    crowd = quick_crowd(client, 6)
    sizes = set[int]()
    until = time.perf_counter() + 1.0

    def is_over() -> bool:
        sizes.add(crowd.size)
        return time.perf_counter() > until

    await crowd.run(is_over)
    assert len(sizes - {0}) > 3
    assert 1 < client.max_running <= 6
    assert (client.running, crowd.size) == (0, 0)
    assert len(crowd.outcomes) == len(client.requests)


async def test_crowd_answers_enter_next_conversation_turn():
    client = FakeClient()
    crowd = quick_crowd(client, 1)
    await crowd.run(lambda: len(crowd.outcomes) >= 40)
    turns = [r for r in client.requests if r.kind is Kind.CONVERSATION]
    assert json.loads(turns[1].body)["messages"][1] == {"role": "assistant", "content": "well"}


async def test_crowd_in_turn_sends_one_request_at_once():
    client = FakeClient()
    crowd = Crowd(client.send, 5, 6)
    await crowd.ask_in_turn([Request(Kind.REFILL, b"1"), Request(Kind.REFILL, b"2")])
    assert [request.body for request in client.requests] == [b"1", b"2"]
    assert (client.max_running, len(crowd.outcomes)) == (1, 2)
