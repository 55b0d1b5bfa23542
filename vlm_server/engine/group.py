"""Who computes the model: this process alone, or with others."""

from __future__ import annotations

from typing import Protocol

from vlm_server.cache.caches import Caches
from vlm_server.interfaces import Runner
from vlm_server.protocol import Start
from vlm_server.runner.device.device import Device
from vlm_server.runner.device.memory import MlxMemory
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.loading.load import load
from vlm_server.runner.model_runner import ModelRunner
from vlm_server.settings import Memory, Model


class Group(Protocol):
    """What an engine is built from, in the order of its methods."""

    def common(self, start: Start, device: Device) -> Start:
        """`start` as it suits all processes."""
        ...

    def memory(self, settings: Memory, device: Device) -> MlxMemory:
        """This process's device memory."""
        ...

    def load(self, settings: Model, device: Device, limit_bytes: int) -> LoadedModel:
        """What this process has of the model. Raises ModelLoadError."""
        ...

    def runner(self, loaded: LoadedModel, caches: Caches, num_draft_tokens: int) -> Runner:
        """What does the engine's plans."""
        ...


class Alone:
    """The `Group` of an engine that has all of its model."""

    def common(self, start: Start, device: Device) -> Start:
        return start

    def memory(self, settings: Memory, device: Device) -> MlxMemory:
        return MlxMemory(settings, device)

    def load(self, settings: Model, device: Device, limit_bytes: int) -> LoadedModel:
        return load(settings, device, limit_bytes)

    def runner(self, loaded: LoadedModel, caches: Caches, num_draft_tokens: int) -> Runner:
        return ModelRunner(loaded, caches, num_draft_tokens)


ALONE = Alone()
