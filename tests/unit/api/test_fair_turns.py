"""Turns of API keys: in fair order, bounded in all and for each key."""

from __future__ import annotations

import asyncio
from collections import Counter

from vlm_server.api.fair_turns import FairOrder, FairTurns


def served(order: FairOrder, owners: str, times: int) -> str:
    """The owners served, each at the cost of 1."""
    names = ""
    for _ in range(times):
        owner = min(owners, key=order.place)
        order.begin(owner)
        order.charge(owner, 1)
        names += owner
    return names


def test_owner_that_comes_late_alternates_with_others() -> None:
    """It does not make up for the time in which it wanted nothing."""
    order = FairOrder()
    served(order, "a", 1000)
    assert Counter(served(order, "ab", 20)) == {"a": 10, "b": 10}
    served(order, "b", 1000)
    assert 9 <= served(order, "ab", 20).count("a") <= 11


async def test_owner_with_long_turns_has_fewer() -> None:
    turns, order = FairTurns(1), list[str]()

    async def turn(owner: str, seconds: float) -> None:
        async with turns.turn(owner):
            order.append(owner)
            await asyncio.sleep(seconds)

    long = [turn("long", 0.1) for _ in range(6)]
    await asyncio.gather(*long, *(turn("short", 0.001) for _ in range(20)))
    assert order[:22].count("short") == 20


async def test_owner_leaves_room_for_others() -> None:
    turns, most, running = FairTurns(3, owner_limit=2), Counter[str](), Counter[str]()

    async def turn(owner: str) -> None:
        async with turns.turn(owner):
            running[owner] += 1
            most[owner] = max(most[owner], running[owner])
            await asyncio.sleep(0.01)
            running[owner] -= 1

    greedy = [asyncio.create_task(turn("greedy")) for _ in range(8)]
    await asyncio.sleep(0.001)
    async with asyncio.timeout(0.005), turns.turn("modest"):
        pass
    await asyncio.gather(*greedy)
    assert most == {"greedy": 2}


async def test_turn_passes_over_owner_cancelled_at_that_moment() -> None:
    turns, order = FairTurns(1), list[str]()

    async def turn(owner: str) -> None:
        async with turns.turn(owner):
            order.append(owner)

    async with turns.turn("first"):
        cancelled, last = (asyncio.create_task(turn(owner)) for owner in ("cancelled", "last"))
        await asyncio.sleep(0)
        cancelled.cancel()
    await last
    assert order == ["last"]
    assert cancelled.cancelled() or cancelled.cancelling()
