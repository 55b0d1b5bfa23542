"""Lets a suspect request have the device to itself: those that come later wait until it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from vlm_server.errors import EngineUnavailable

_PATIENCE_SECONDS = 10.0
"""How long a trial, and who comes after it, waits for answers that have begun. Then it goes on
beside them: the device has done for them what it is suspected to die of."""


_MOST_SECONDS = 30.0
"""After that, how long for those that have not begun."""


class Trials:
    """Who may be sent to the engine, and when. Use from one event loop."""

    def __init__(self) -> None:
        self._alone: str | None = None
        self._starting: set[str] = set()
        """Requests that the engine has and that have no token yet."""
        self._answering: set[str] = set()
        self._changed = asyncio.Event()

    async def turn(self, request_id: str, is_suspect: Callable[[], bool]) -> bool:
        """Wait until a request may be sent; whether it is then tried alone.

        Raises what `is_suspect` does, which is asked when no other trial is under way.
        """
        while self._alone is not None:
            await self._changed.wait()
        is_alone = is_suspect()
        if is_alone:
            self._alone = request_id
            try:
                await self._wait_for_others()
            except BaseException:
                self.ended(request_id)
                raise
        self._starting.add(request_id)
        return is_alone

    def answering(self, request_id: str) -> None:
        """The request has a token: a trial has shown what it was to show."""
        if request_id in self._starting:
            self._answering.add(request_id)
            self._leave(request_id)

    def ended(self, request_id: str) -> None:
        """The engine has nothing more to do for the request."""
        self._answering.discard(request_id)
        self._leave(request_id)

    def engine_ended(self) -> None:
        """Nothing is left of any request; who waits may go on."""
        self._starting.clear()
        self._answering.clear()
        self._alone = None
        self._tell()

    async def _wait_for_others(self) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                while self._starting or self._answering:
                    await self._changed.wait()
        except TimeoutError:
            await self._wait_for_starting()

    async def _wait_for_starting(self) -> None:
        """Raises EngineUnavailable if that takes long: everybody else waits, too."""
        try:
            async with asyncio.timeout(_MOST_SECONDS):
                while self._starting:
                    await self._changed.wait()
        except TimeoutError:
            raise EngineUnavailable(
                "Requests of this size have crashed the engine, and the server has no time to try "
                "one alone; try again later."
            ) from None

    def _leave(self, request_id: str) -> None:
        self._starting.discard(request_id)
        if self._alone == request_id:
            self._alone = None
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
