"""The order in which models are loaded and unloaded: one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from vlm_server.supervisor.models.served_model import ServedModel


class LoadTurns:
    """Turns at loading and unloading, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._at_turn = ""
        """The turn under way, as the end of a sentence."""
        self._to_load: list[ServedModel] = []
        """Models that wait to be loaded; their status says what for."""

    @asynccontextmanager
    async def turn(self, model: ServedModel, *, to_load: bool) -> AsyncIterator[None]:
        """A turn to load `model`, or to unload it."""
        waiting_models = [model] if to_load else []
        self._to_load += waiting_models
        self._update()
        try:
            await self._lock.acquire()
        finally:
            self._to_load = [queued for queued in self._to_load if queued not in waiting_models]
        try:
            self._at_turn = f"`{model.name}` is {'loaded' if to_load else 'unloaded'}"
            self._update()
            yield
        finally:
            self._at_turn = ""
            self._lock.release()

    def _update(self) -> None:
        for model in self._to_load:
            model.set_waiting(f"waiting until {self._at_turn}" if self._at_turn else "")
