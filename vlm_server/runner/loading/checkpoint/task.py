"""Whether a checkpoint makes vectors or scores, and by which family of mlx-vlm.

An embedding model is mostly a language model without its head, and has that one's `model_type`. It
is recognized by the files of Sentence Transformers, or by `model.task`. A model that scores pairs
of texts is an encoder with a classifier, which its `architectures` name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mlx_vlm.embedding_loader import EMBEDDING_MODEL_REMAPPING
from mlx_vlm.reranker_loader import is_sequence_classifier_config

from vlm_server.errors import ModelLoadError
from vlm_server.hub.layout import POOLING, SENTENCE_MODULES, TOKEN_PROJECTION
from vlm_server.runner.families.table import FAMILIES, row_of

_FAMILIES = {**EMBEDDING_MODEL_REMAPPING, "qwen3_vl": "qwen3_vl_embedding"}
"""Families that make vectors, by the `model_type` of the language model that they are."""
_PROJECTED = {"lfm2": "lfm2_colbert"}
"""The same for checkpoints that project the vector of each token."""


def with_task(config: dict[str, Any], names: Collection[str], task: str) -> dict[str, Any]:
    """`config` (config.json) with the `model_type` that makes vectors, if this checkpoint does.

    names: of its files and folders. task: `CheckpointSettings.task`. Raises ModelLoadError if it
    should make vectors, and mlx-vlm has no family for that.
    """
    if _is_classifier(config):
        return config | {"model_type": f"{_plain_name(config)}_reranker"}
    row = row_of(config)
    if row is not None and row.embeds is not None:
        if task == "generate":
            raise ModelLoadError(f"{row.name} makes vectors and can't answer: leave model.task out")
        return config | {"model_type": row.name}
    is_marked = SENTENCE_MODULES in names or POOLING in names
    if task == "generate" or (task == "auto" and not is_marked):
        return config
    family = _family_of(config, names)
    if family is None:
        why = "model.task says so" if task == "embed" else f"it has {SENTENCE_MODULES}"
        raise ModelLoadError(
            f"this model makes vectors ({why}), and mlx-vlm has no embedding model of "
            f"{config.get('model_type')} (docs/embeddings.md)"
        )
    return config | {"model_type": family}


def _is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether `config` is of an encoder that scores pairs of texts."""
    name = f"{_plain_name(config)}_reranker"
    return name in FAMILIES and is_sequence_classifier_config(dict(config))


def _plain_name(config: Mapping[str, Any]) -> str:
    return str(config.get("model_type", "")).lower().replace("-", "_")


def _family_of(config: Mapping[str, Any], names: Collection[str]) -> str | None:
    name = str(config.get("model_type", "")).lower()
    if TOKEN_PROJECTION in names and name in _PROJECTED:
        return _PROJECTED[name]
    return _FAMILIES.get(name)
