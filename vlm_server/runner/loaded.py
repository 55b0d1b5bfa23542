"""A model on its device, which everyone in `runner` works with. `loading` makes it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from vlm_server.interfaces.model_spec import ModelSpec
from vlm_server.runner.backends import backend_of
from vlm_server.runner.backends.interface import Backend
from vlm_server.runner.device.arrays import Faults
from vlm_server.runner.device.device import Device
from vlm_server.runner.families import Family
from vlm_server.runner.fingerprint import Checkpoint
from vlm_server.runner.model.attention import ModelAttention
from vlm_server.runner.model.mrope import DecodePositions
from vlm_server.runner.model.text_model import TextModel
from vlm_server.runner.model.tiles import Tiling
from vlm_server.runner.ranks import Ranks


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, and all that is known of it.

    model: mlx-vlm's, with every array evaluated, so that any thread may run it.
    spec: what prompts need of it. checkpoint: its files.
    decode_positions: which positions a decode step passes.
    attention: our own, where the device gains by it. text: runs its language model.
    position_lock: held by callers of the model; a null context unless encoding writes positions on
    the language model, which another thread may be launching.
    faults: the errors of its device. ranks: None if this process has all of the model.
    """

    model: Any
    processor: Any
    family: Family
    spec: ModelSpec
    checkpoint: Checkpoint
    device: Device
    decode_positions: DecodePositions
    attention: ModelAttention
    text: TextModel
    default_temperature: float
    default_top_p: float
    position_lock: AbstractContextManager[Any]
    faults: Faults
    ranks: Ranks | None = None

    @property
    def language_model(self) -> Any:
        return self.model.language_model

    @property
    def backend(self) -> Backend:
        return backend_of(self.device)

    @property
    def tiling(self) -> Tiling | None:
        """The tiling by which its pictures are encoded; None if they are encoded as a whole."""
        return self.family.tiling if self.backend.is_filled_by_a_tile else None

    def forget_positions(self) -> None:
        """Clear what mlx-vlm keeps of a prompt on the model."""
        self.family.forget_positions(self.language_model)
