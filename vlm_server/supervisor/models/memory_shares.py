"""What each loaded model may take of the device's memory, and how it is told. Sizes in bytes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from vlm_server.errors import ModelLoadError
from vlm_server.hub.survey import Survey, SurveyRequest
from vlm_server.settings import Memory
from vlm_server.supervisor.models import budget
from vlm_server.supervisor.models.served_model import ServedModel

logger = logging.getLogger(__name__)

Look = Callable[[SurveyRequest], Awaitable[Survey]]

_ALIVE = ("ready", "unresponsive")
"""States of engines that hold what they held: others have ended, or begin anew."""
_LOOK_SECONDS = 0.05
"""Between two looks at whether others have given back memory."""
_GIVE_BACK_SECONDS = 60.0
"""The longest that a load waits for engines that are told to shrink, beside running answers."""


class MemoryShares:
    """One limit for all of `models`, which may become more. A single one has all there is."""

    def __init__(self, memory: Memory, models: Mapping[str, ServedModel], look: Look) -> None:
        """`look`: see `checkpoints.survey`."""
        self._room_bytes = memory.model_room_bytes
        self._limit_bytes = memory.known_limit_bytes
        """0 as long as nobody knows."""
        self._models = models
        self._look = look

    @property
    def loaded(self) -> list[ServedModel]:
        return [model for model in self._models.values() if model.is_loaded]

    async def check(self, model: ServedModel) -> None:
        """Find out what a model needs, and whether it can ever be loaded beside what stays.

        Raises ModelLoadError and ModelDoesNotFit.
        """
        await self._survey(model)
        staying = {one.name: self._needed(one) for one in self.loaded if one.is_pinned}
        budget.check(model.name, self._needed(model), staying, self._limit_bytes)

    def is_short(self, model: ServedModel) -> bool:
        """Whether others have to go before a model that was checked can be loaded."""
        return sum(map(self._needed, (model, *self.loaded))) > self._limit_bytes

    async def claim(self, model: ServedModel) -> int:
        """Take from those that are loaded what a model gets, which is returned.

        Running answers keep what was reserved for them. An engine that does not tell
        that it got small enough is waited for only so long: it may be restarting.
        """
        others = self.loaded
        shares = self._shares([*others, model])
        self._tell(others, shares)
        until = time.monotonic() + _GIVE_BACK_SECONDS
        for other in others:
            while not _is_within(other, shares[other.name]):
                if other.is_idle and time.monotonic() > until:
                    logger.warning("the model `%s` does not give memory back", other.name)
                    break
                await asyncio.sleep(_LOOK_SECONDS)
        return shares[model.name]

    def share_out(self) -> None:
        """Let those that are loaded have all there is."""
        if len(self._models) > 1 and self._limit_bytes:
            models = [one for one in self._models.values() if one.engine is not None]
            self._tell(models, self._shares(models))

    def _shares(self, models: Sequence[ServedModel]) -> dict[str, int]:
        needed = {model.name: self._needed(model) for model in models}
        return budget.shares(needed, self._limit_bytes)

    @staticmethod
    def _tell(models: Sequence[ServedModel], shares: Mapping[str, int]) -> None:
        for model in models:
            if model.engine is not None:
                model.engine.set_memory_limit(shares[model.name])

    def _needed(self, model: ServedModel) -> int:
        return budget.needed_bytes(model.weight_bytes, self._room_bytes, model.least_kv_bytes)

    async def _survey(self, model: ServedModel) -> None:
        """Find the weights' sizes and the memory limit where they are still unknown."""
        for one in (*self.loaded, model):
            if (stats := one.status.stats) is not None:
                one.weight_bytes = max(one.weight_bytes, stats.memory.baseline_bytes)
                self._limit_bytes = self._limit_bytes or stats.memory.limit_bytes
            if not (one.weight_bytes and self._limit_bytes):
                await self._look_at(one, must_load=one is model)

    async def _look_at(self, model: ServedModel, *, must_load: bool) -> None:
        settings = model.settings
        found = await self._look(SurveyRequest(settings.model, settings.memory))
        if found.refusal and must_load:
            raise ModelLoadError(found.refusal)
        model.weight_bytes, model.least_kv_bytes = found.weight_bytes, found.least_kv_bytes
        self._limit_bytes = self._limit_bytes or found.limit_bytes


def _is_within(model: ServedModel, limit_bytes: int) -> bool:
    """Whether all that it holds and has reserved is under `limit_bytes`, as it reports itself."""
    if model.engine is None or model.engine.status.state not in _ALIVE:
        return True
    stats = model.engine.status.stats
    if stats is None:
        return False
    memory = stats.memory
    held = memory.active_bytes + memory.reserved_bytes
    return memory.limit_bytes == limit_bytes and held <= limit_bytes
