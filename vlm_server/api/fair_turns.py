"""Fairness between API keys where one thing is shared: their turns, their order, their room, and
child processes of which each has its share.

Start-time fair queueing (Goyal, Vin and Cheng, 1996), as in the engine's queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Generic, TypeVar

import anyio
import anyio.to_thread
from msgspec import Struct, msgpack

from vlm_server.api.outcomes import SentError
from vlm_server.errors import EngineUnavailable
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.platform.child.pool import ChildNotStarted, ChildPool

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Struct)


def room_of(owner: str, sizes: Mapping[str, int], limit: int) -> int:
    """What `owner` may have of `limit`: an equal share, or what other owners leave.

    sizes: what each owner with some has.
    """
    others = [size for other, size in sizes.items() if other != owner]
    return max(limit // (1 + len(others)), limit - sum(others))


class FairOrder:
    """The owner with the least `place` is next.

    An owner's place grows by what its turns cost. One that comes, or comes back, begins at the
    place of the owner served last: it is neither behind others nor far ahead of them.
    """

    def __init__(self) -> None:
        self._now = 0.0
        """The place of the owner served last; never decreases."""
        self._places: dict[str, float] = {}
        """Places of owners, if later than that."""

    def place(self, owner: str) -> float:
        return self._places.get(owner, self._now)

    def begin(self, owner: str) -> None:
        """`owner` is served."""
        self._now = max(self._now, self.place(owner))
        self._places = {each: at for each, at in self._places.items() if at > self._now}

    def charge(self, owner: str, cost: float) -> None:
        """What a turn of `owner` cost."""
        self._places[owner] = self.place(owner) + cost


class FairTurns:
    """At most `limit` turns at a time, of an owner at most `owner_limit`; the cost is their time.

    The next turn is that of the owner with the fewest running, then of the first in `FairOrder`;
    those of one owner are in the order of arrival. Use from one event loop.
    """

    def __init__(self, limit: int, owner_limit: int | None = None) -> None:
        self._limit = limit
        self._owner_limit = limit if owner_limit is None else owner_limit
        self._order = FairOrder()
        self._running = Counter[str]()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """The `with` block is a turn of `owner`."""
        loop = asyncio.get_running_loop()
        turn, began_at = loop.create_future(), 0.0
        self._waiting.append((owner, turn))
        self._begin_next()
        try:
            await turn
            began_at = loop.time()
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._running -= Counter([owner])
                self._order.charge(owner, loop.time() - began_at if began_at else 0.0)
            self._waiting = [entry for entry in self._waiting if entry[1] is not turn]
            self._begin_next()

    def _begin_next(self) -> None:
        while self._running.total() < self._limit:
            ready = [
                (owner, turn)
                for owner, turn in self._waiting
                if not turn.done()  # cancelled, and not yet removed
                if self._running[owner] < self._owner_limit
            ]
            if not ready:
                return
            owner, turn = min(ready, key=self._place)
            self._waiting.remove((owner, turn))
            self._running[owner] += 1
            self._order.begin(owner)
            turn.set_result(None)

    def _place(self, entry: tuple[str, asyncio.Future[None]]) -> tuple[int, float]:
        return self._running[entry[0]], self._order.place(entry[0])


class FairPool(Generic[T]):
    """At most `size` processes of `module`, which calls `serve_outcomes`; started on demand.

    An owner has at most `owner_limit` of them at a time. Use from one event loop.
    """

    def __init__(
        self,
        module: str,
        size: int,
        *arguments: object,
        outcome: type[T],
        memory_bytes: int,
        owner_limit: int | None = None,
    ) -> None:
        """arguments: of the process, after `memory_bytes`. outcome: of a job."""
        words = map(str, (memory_bytes, *arguments))
        self._pool = ChildPool(module, size, *words, memory_bytes=memory_bytes)
        self._turns = FairTurns(size, owner_limit)
        self._threads = anyio.CapacityLimiter(size)
        self._decoder: msgpack.Decoder[T | SentError] = msgpack.Decoder(outcome | SentError)

    async def run(self, job: bytes | bytearray, owner: str, seconds: float) -> T:
        """The outcome of `job`, in a turn of `owner`. Cancelling kills the process.

        Raises the job's RequestError, EngineUnavailable if the machine is short of processes,
        ChildTimeout and ChildFailed.
        """
        cancellation = Cancellation()
        run = partial(self._pool.run, job, seconds, cancellation)
        try:
            async with self._turns.turn(owner):
                answer = await anyio.to_thread.run_sync(
                    run, abandon_on_cancel=True, limiter=self._threads
                )
        except ChildNotStarted as error:
            logger.warning("a process for clients' data %s", error)
            raise EngineUnavailable("The server is short of processes; try again later.") from None
        finally:
            cancellation.cancel()
        outcome = self._decoder.decode(answer)
        if isinstance(outcome, SentError):
            raise outcome.received()
        return outcome

    def close(self) -> None:
        """End idle processes."""
        self._pool.close()
