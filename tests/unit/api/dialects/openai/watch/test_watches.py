"""Turns of watches: few at a time, fair to keys, after other requests."""

from __future__ import annotations

import asyncio
import time

from vlm_server.api.dialects.openai.watch.watches import Turns


async def test_turns_are_bounded_and_fair_to_keys() -> None:
    """One key with many watches does not delay another's."""
    turns, order, running, most = Turns(2, 0.0, lambda: False), list[str](), 0, 0

    async def question(owner: str) -> None:
        nonlocal running, most
        async with turns.turn(owner):
            running += 1
            most = max(most, running)
            order.append(owner)
            await asyncio.sleep(0.001)
            running -= 1

    await asyncio.gather(*(question("many") for _ in range(20)), question("one"))
    assert most == 2
    assert order.index("one") <= 2
    assert len(order) == 21


async def test_cancelled_questions_leave_their_turns_to_others() -> None:
    turns = Turns(1, 0.0, lambda: False)

    async def question() -> None:
        async with turns.turn("key"):
            await asyncio.sleep(10)

    tasks = [asyncio.create_task(question()) for _ in range(3)]
    await asyncio.sleep(0.01)
    for task in (tasks[1], tasks[0], tasks[2]):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(1), turns.turn("key"):
        pass


async def test_question_lets_others_go_first_for_bounded_time() -> None:
    others = True
    turns = Turns(1, 0.3, lambda: others)
    began_at = time.monotonic()
    async with turns.turn("key"):
        assert 0.25 < time.monotonic() - began_at < 2
    others = False
    began_at = time.monotonic()
    async with turns.turn("key"):
        assert time.monotonic() - began_at < 0.2
