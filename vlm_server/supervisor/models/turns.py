"""Turns at loading and unloading models, one after another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from vlm_server.supervisor.models.served_model import ServedModel


class Turns:
    """Turns at loading and unloading, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._at_turn = ""
        """The turn under way, as the end of a sentence."""
        self._waiting: list[ServedModel] = []
        """Models that are to be loaded."""

    @asynccontextmanager
    async def to_load(self, model: ServedModel) -> AsyncIterator[None]:
        """A turn to load `model`, whose status says what it waits for."""
        self._waiting.append(model)
        self._tell()
        try:
            await self._lock.acquire()
        finally:
            self._waiting.remove(model)
        async with self._held(f"`{model.name}` is loaded"):
            yield

    @asynccontextmanager
    async def to_unload(self, model: ServedModel) -> AsyncIterator[None]:
        """A turn to unload `model`."""
        await self._lock.acquire()
        async with self._held(f"`{model.name}` is unloaded"):
            yield

    @asynccontextmanager
    async def _held(self, at_turn: str) -> AsyncIterator[None]:
        self._at_turn = at_turn
        self._tell()
        try:
            yield
        finally:
            self._at_turn = ""
            self._lock.release()

    def _tell(self) -> None:
        for model in self._waiting:
            model.set_waiting(f"waiting until {self._at_turn}" if self._at_turn else "")
