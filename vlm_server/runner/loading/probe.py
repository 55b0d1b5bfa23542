"""Properties of a loaded model of mlx-vlm that depend on the checkpoint.

The only code that probes a model: once, at load. For a checked family the answers
must be those of its row (tests/integration/test_family_table.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.llava.processing_llava import LlavaProcessor
from numpy.typing import NDArray

from vlm_server.cache.kv_storage import EXACT, KVStorage
from vlm_server.interfaces.model_spec import AskPositions, ChunkPolicy
from vlm_server.runner.device.arrays import to_numpy
from vlm_server.runner.families.corrections.processors import drop_tokenizer_options
from vlm_server.runner.families.family import Family, MRopeRule
from vlm_server.runner.families.table import WRITE_PROMPTS
from vlm_server.runner.kv.layers import new_layers
from vlm_server.runner.kv.segments import StateSize
from vlm_server.runner.loading.drafter import layers_of
from vlm_server.runner.model.mrope import forget_positions
from vlm_server.runner.vision.towers import fast_tower_of

_PROBE_TOKENS = 2


def probe(name: str, model: Any, processor: Any) -> Family:
    """The properties of a family without a row.

    Whether it takes videos can't be probed, so it gets them as images.
    """
    language_model = model.language_model
    return Family(
        name,
        is_checked=False,
        reads_images=hasattr(_package_of(model), "VisionConfig"),
        mrope=MRopeRule.ASK_MODEL if hasattr(language_model, "get_rope_index") else None,
        tower=fast_tower_of(getattr(model, "vision_tower", None)),
        fix=drop_tokenizer_options if isinstance(processor, LlavaProcessor) else None,
        writes_prompts=name in WRITE_PROMPTS,
    )


def _package_of(model: Any) -> ModuleType:
    """mlx-vlm's package of the model's family."""
    return sys.modules[type(model).__module__.rpartition(".")[0]]


def planned_state_size(
    language_model: Any, drafter: Any | None = None, storage: KVStorage = EXACT
) -> StateSize:
    """The memory of a sequence, from a lazy step that is never computed.

    drafter: mlx-vlm's module of a draft head. storage: of running sequences. No other step of the
    model may be under way.
    """
    layers = new_layers(language_model, storage)
    token_ids = mx.zeros((1, _PROBE_TOKENS), dtype=mx.int32)
    language_model(token_ids, cache=layers)
    forget_positions(language_model)
    if drafter is not None:
        layers += layers_of(drafter, language_model, token_ids, storage)
    return StateSize(layers, _PROBE_TOKENS)


def chunk_policy(model: Any) -> ChunkPolicy:
    """The places at which mlx-vlm allows to cut a prompt, by the checkpoint's configuration."""
    if not _allows_chunks(model, [0, 0]):
        return ChunkPolicy.NOWHERE
    return ChunkPolicy.ANYWHERE if _allows_chunks(model, [0, 1]) else ChunkPolicy.AFTER_MEDIA


def ask_positions(language_model: Any) -> AskPositions:
    """M-RoPE positions by mlx-vlm's own rule for this family. Does not write on the module."""

    def positions(
        token_ids: NDArray[np.int32], grids: Mapping[str, NDArray[Any]]
    ) -> NDArray[np.int32]:
        begin = [media_start(language_model.config)]  # families find media by it
        arrays = {name: mx.array(rows) for name, rows in grids.items()}
        ids = mx.array(np.concatenate([begin, token_ids]).astype(np.int32))[None]
        position_ids, _ = language_model.get_rope_index(ids, **arrays)
        three = to_numpy(position_ids).astype(np.int32).reshape(-1, len(token_ids) + 1)
        return np.broadcast_to(three[:, 1:] - 1, (3, len(token_ids)))

    return positions


def text_positions(
    token_ids: NDArray[np.int32], _grids: Mapping[str, NDArray[Any]]
) -> NDArray[np.int32]:
    """M-RoPE positions of a media item as of so many tokens of text."""
    return np.broadcast_to(np.arange(len(token_ids), dtype=np.int32), (3, len(token_ids)))


def media_start(config: Any) -> int:
    """The id of the token before an image."""
    names = ("vision_start_token_id", "image_start_token_id")
    return int(next(getattr(config, name) for name in names if hasattr(config, name)))


def _allows_chunks(model: Any, token_types: list[int]) -> bool:
    """Whether mlx-vlm would chunk such tokens: 1 for a media token, 0 for text."""
    modules = (model, model.language_model)
    for module in modules:
        if (policy := getattr(module, "chunked_prefill_policy", None)) is not None:
            answer = policy(prefill_kwargs={"mm_token_type_ids": mx.array([token_types])})
            return bool(getattr(answer, "enabled", answer))
    return not any(getattr(module, "no_chunked_prefill", False) for module in modules)
