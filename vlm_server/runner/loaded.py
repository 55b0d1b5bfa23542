"""A model on its device. `loading` makes it."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from vlm_server.cache.kv_storage import EXACT, KVStorage
from vlm_server.interfaces.model_spec import ModelSpec
from vlm_server.protocol import SamplingParams
from vlm_server.runner.backends import backend_of
from vlm_server.runner.backends.interface import Backend
from vlm_server.runner.device.arrays import DeviceErrors
from vlm_server.runner.device.device import Device
from vlm_server.runner.drafters.draft_head import DraftHead
from vlm_server.runner.families.family import Family
from vlm_server.runner.fingerprint import Checkpoint
from vlm_server.runner.kv.layers import empty_layer, new_layers
from vlm_server.runner.model.attention import ModelAttention
from vlm_server.runner.model.forward_pass import embed_text
from vlm_server.runner.model.mrope import DecodePositions, forget_positions
from vlm_server.runner.model.text_model import TextModel
from vlm_server.runner.ranks import Ranks
from vlm_server.runner.vision.tiles import Tiling


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, and all that is known of it."""

    model: Any
    """mlx-vlm's model, with every array evaluated, so that any thread may run it."""
    processor: Any
    family: Family
    spec: ModelSpec
    """The facts that prompts need."""
    checkpoint: Checkpoint
    """The files it was loaded from."""
    parameters: Counter[str]
    """Numbers of parameters before quantization, by their storage: `4bit`, `bfloat16`."""
    size_bytes: int
    """Bytes of the checkpoint's weights."""
    device: Device
    decode_positions: DecodePositions
    """The position arguments of a decode step."""
    attention: ModelAttention
    """The backend's attention in the place of mlx-vlm's."""
    text: TextModel
    """Runs its language model."""
    default_sampling: SamplingParams
    """The checkpoint's own sampling, for what a request leaves open."""
    position_lock: AbstractContextManager[Any]
    """Held to call the model; a null context unless encoding writes positions on the language model
    while another thread may launch it."""
    errors: DeviceErrors
    """The errors of its device."""
    ranks: Ranks | None = None
    """None if this process has all of the model."""
    draft_head: DraftHead | None = None
    """Its trained drafter, if it has one."""
    kv_storage: KVStorage = EXACT
    """How running sequences hold KV."""

    @property
    def language_model(self) -> Any:
        return language_model_of(self.model)

    @property
    def backend(self) -> Backend:
        return backend_of(self.device)

    @property
    def tiling(self) -> Tiling | None:
        """The tiling with which its images are encoded; None to encode them as a whole."""
        return self.family.tiling if self.backend.is_filled_by_a_tile else None

    def new_layers(self) -> list[Any]:
        """An empty cache for each layer of one sequence: the model's, then the draft head's."""
        layers = new_layers(self.language_model, self.kv_storage)
        return layers + [empty_layer(None, self.kv_storage) for _ in range(self._num_head_layers)]

    def model_layers(self, layers: list[Any]) -> list[Any]:
        """The part of `new_layers` that is the model's."""
        return layers[: len(layers) - self._num_head_layers]

    def head_layers(self, layers: list[Any]) -> list[Any]:
        """The part of `new_layers` that the draft head appends to or attends to."""
        return [] if self.draft_head is None else self.draft_head.layers_of(layers)

    @property
    def _num_head_layers(self) -> int:
        return 0 if self.draft_head is None else self.draft_head.num_layers

    @property
    def drafter(self) -> Any | None:
        """mlx-vlm's module of the draft head."""
        return None if self.draft_head is None else self.draft_head.module

    def embed_text(self, token_ids: mx.array) -> dict[str, mx.array]:
        """The language model's inputs for `token_ids`, (rows, tokens), of text; lazy."""
        inputs = embed_text(self.model, token_ids)
        self.forget_positions()
        return inputs

    def forget_positions(self) -> None:
        """Clear the positions that mlx-vlm keeps of a prompt on the model."""
        forget_positions(self.language_model)


def language_model_of(model: Any) -> Any:
    """The language model of mlx-vlm's `model`: all of one that makes vectors of text alone."""
    return getattr(model, "language_model", model)
