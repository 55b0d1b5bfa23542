"""Trials: a request of a size that may have crashed engines runs alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from vlm_server.errors import EngineUnavailable

_PATIENCE_SECONDS = 10.0
"""Time that a trial, and requests after it, wait for running answers. Then it runs with them:
the device survived their prefill."""
_MAX_SECONDS = 30.0
"""Further time that it waits for requests without a token."""


class Trials:
    """Runs suspect requests alone, while later ones wait. For use from one event loop only."""

    def __init__(self) -> None:
        self.request_id: str | None = None
        """The request on trial, or waiting to be tried."""
        self._starting: set[str] = set()
        """Requests that the engine has and that have no token yet."""
        self._answering: set[str] = set()
        self._changed = asyncio.Event()

    async def wait_for_turn(self, request_id: str, is_suspect: Callable[[], bool]) -> bool:
        """Wait until a request may be sent; returns whether it is tried alone.

        `is_suspect` is called once no other trial is under way; its errors are raised.
        """
        while self.request_id is not None:
            await self._changed.wait()
        is_alone = is_suspect()
        if is_alone:
            self.request_id = request_id
            try:
                await self._wait_for_others()
            except BaseException:
                self.remove(request_id)
                raise
        self._starting.add(request_id)
        return is_alone

    def record_token(self, request_id: str) -> None:
        """Record a request's first token, which ends its trial."""
        if request_id in self._starting:
            self._answering.add(request_id)
            self._end_trial(request_id)

    def remove(self, request_id: str) -> None:
        """Record that the engine is done with a request."""
        self._answering.discard(request_id)
        self._end_trial(request_id)

    def clear(self) -> None:
        """Remove all requests, and let waiting ones proceed."""
        self._starting.clear()
        self._answering.clear()
        self.request_id = None
        self._notify()

    async def _wait_for_others(self) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                while self._starting or self._answering:
                    await self._changed.wait()
        except TimeoutError:
            await self._wait_for_starting()

    async def _wait_for_starting(self) -> None:
        """Raises EngineUnavailable after `_MAX_SECONDS`: all later requests wait, too."""
        try:
            async with asyncio.timeout(_MAX_SECONDS):
                while self._starting:
                    await self._changed.wait()
        except TimeoutError:
            raise EngineUnavailable(
                "Requests of this size have crashed the engine, and the server has no time to try "
                "one alone; try again later."
            ) from None

    def _end_trial(self, request_id: str) -> None:
        self._starting.discard(request_id)
        if self.request_id == request_id:
            self.request_id = None
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
