"""Each loaded model's share of the device's memory. Sizes in bytes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from vlm_server.errors import ModelDoesNotFit, ModelLoadError
from vlm_server.hub.examination import Examination, ExaminationRequest
from vlm_server.settings import MIB, MemorySettings
from vlm_server.sizes import memory_size
from vlm_server.supervisor.models.served_model import ServedModel

logger = logging.getLogger(__name__)

ExamineCheckpoint = Callable[[ExaminationRequest], Awaitable[Examination]]

_ALIVE = ("ready", "unresponsive")
"""States of engines whose last memory report still holds."""
_LOOK_SECONDS = 0.05
"""Interval of checks whether the other models have given memory back."""
_GIVE_BACK_SECONDS = 60.0
"""Time limit of a load's wait for idle engines that have to give memory back."""


class MemoryShares:
    """Divides one memory limit between `models`, which may grow. A single model gets all of it."""

    def __init__(
        self,
        memory: MemorySettings,
        models: Mapping[str, ServedModel],
        examine: ExamineCheckpoint,
    ) -> None:
        self._room_bytes = memory.min_model_room_bytes
        self._limit_bytes = memory.known_limit_bytes
        """0 until it is known."""
        self._models = models
        self._examine_checkpoint = examine

    @property
    def loaded(self) -> list[ServedModel]:
        return [model for model in self._models.values() if model.is_loaded]

    async def check(self, model: ServedModel) -> None:
        """Find a model's memory, and check that it fits next to the pinned ones.

        Raises ModelLoadError and ModelDoesNotFit.
        """
        await self._examine_all(model)
        pinned_bytes = {
            pinned.name: self._needed_bytes(pinned) for pinned in self.loaded if pinned.is_pinned
        }
        check_fit(model.name, self._needed_bytes(model), pinned_bytes, self._limit_bytes)

    def is_short(self, model: ServedModel) -> bool:
        """Whether others have to be unloaded before a checked model can be loaded."""
        return sum(map(self._needed_bytes, (model, *self.loaded))) > self._limit_bytes

    async def shrink_others_for(self, model: ServedModel) -> int:
        """Shrink the loaded models to make room for one more, and return its limit.

        Running requests keep their reserved memory. The wait for an idle engine to report that it
        is within its limit ends after `_GIVE_BACK_SECONDS`: it may be restarting.
        """
        other_models = self.loaded
        shares = self._shares([*other_models, model])
        self._set_limits(other_models, shares)
        deadline = time.monotonic() + _GIVE_BACK_SECONDS
        for other in other_models:
            while not _is_within(other, shares[other.name]):
                if other.is_idle and time.monotonic() > deadline:
                    logger.warning("the model `%s` does not give memory back", other.name)
                    break
                await asyncio.sleep(_LOOK_SECONDS)
        return shares[model.name]

    def share_out(self) -> None:
        """Share all memory between the loaded models."""
        if len(self._models) > 1 and self._limit_bytes:
            models = [model for model in self._models.values() if model.engine is not None]
            self._set_limits(models, self._shares(models))

    def _shares(self, models: Sequence[ServedModel]) -> dict[str, int]:
        return divide(
            {model.name: self._needed_bytes(model) for model in models}, self._limit_bytes
        )

    @staticmethod
    def _set_limits(models: Sequence[ServedModel], shares: Mapping[str, int]) -> None:
        for model in models:
            if model.engine is not None:
                model.engine.set_memory_limit(shares[model.name])

    def _needed_bytes(self, model: ServedModel) -> int:
        return needed_bytes(model.weight_bytes, self._room_bytes, model.least_kv_bytes)

    async def _examine_all(self, model: ServedModel) -> None:
        """Find the weights' sizes and the memory limit where they are still unknown."""
        for served_model in (*self.loaded, model):
            if (stats := served_model.status.stats) is not None:
                served_model.weight_bytes = max(
                    served_model.weight_bytes, stats.memory.baseline_bytes
                )
                self._limit_bytes = self._limit_bytes or stats.memory.limit_bytes
            if not (served_model.weight_bytes and self._limit_bytes):
                await self._examine(served_model, must_load=served_model is model)

    async def _examine(self, model: ServedModel, *, must_load: bool) -> None:
        settings = model.settings
        examination = await self._examine_checkpoint(
            ExaminationRequest(
                settings.model,
                settings.memory,
                adapters=settings.adapters_of(model.name),
                cache=settings.cache,
            )
        )
        if examination.refusal and must_load:
            raise ModelLoadError(examination.refusal)
        model.weight_bytes = examination.weight_bytes
        model.least_kv_bytes = examination.least_kv_bytes
        self._limit_bytes = self._limit_bytes or examination.limit_bytes


def _is_within(model: ServedModel, limit_bytes: int) -> bool:
    """Whether a model reports that its held and reserved memory is under `limit_bytes`."""
    if model.engine is None or model.engine.status.state not in _ALIVE:
        return True
    stats = model.engine.status.stats
    if stats is None:
        return False
    memory = stats.memory
    held_bytes = memory.active_bytes + memory.reserved_bytes
    return memory.limit_bytes == limit_bytes and held_bytes <= limit_bytes


_LEAST_ROOM_BYTES = 256 * MIB
_ROOM_FRACTION = 1 / 8


def needed_bytes(weight_bytes: int, room_bytes: int | None, least_kv_bytes: int = 0) -> int:
    """The minimum for a model: its weights, and room for requests.

    room_bytes: `memory.min_model_room_bytes`. least_kv_bytes: KV of the shortest request that
    must fit; counted twice, for temporary memory.
    """
    room = room_bytes
    if room is None:
        room = max(_LEAST_ROOM_BYTES, int(weight_bytes * _ROOM_FRACTION))
    return weight_bytes + max(room, 2 * least_kv_bytes)


def divide(needed_by_name: Mapping[str, int], limit_bytes: int) -> dict[str, int]:
    """Each model's limit: as much as it needs, and an equal part of the rest.

    If they need more than there is, as may turn out after loading, each gets equally less.
    """
    rest_bytes = limit_bytes - sum(needed_by_name.values())
    return {
        name: num_bytes + rest_bytes // len(needed_by_name)
        for name, num_bytes in needed_by_name.items()
    }


def check_fit(
    name: str, needed_bytes: int, staying_bytes: Mapping[str, int], limit_bytes: int
) -> None:
    """Raises ModelDoesNotFit if there is no memory for `name` even with all models unloaded but
    those `staying_bytes`."""
    held_bytes = sum(staying_bytes.values())
    if needed_bytes + held_bytes <= limit_bytes:
        return
    other_models = (
        f", and {', '.join(staying_bytes)} keep {memory_size(held_bytes)} of it"
        if staying_bytes
        else ""
    )
    raise ModelDoesNotFit(
        f"The model `{name}` needs {memory_size(needed_bytes)} of device memory, with room for "
        f"requests; the limit is {memory_size(limit_bytes)}{other_models}."
    )
