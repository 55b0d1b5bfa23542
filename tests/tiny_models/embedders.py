"""Models that make vectors: of pictures and texts, or of texts alone."""

from __future__ import annotations

from dataclasses import replace

from tests.tiny_models import qwen
from tests.tiny_models.checkpoint import Checkpoint, Family, Json
from tests.tiny_models.vocabulary import Vocabulary
from tests.tiny_models.weights import Style

_NO_HEAD = Style(writes=False)


def _without_head(checkpoint: Checkpoint, model_type: str, **config: object) -> Checkpoint:
    """`checkpoint` as a model that makes vectors, with further settings of `config`."""
    changed: Json = {**checkpoint.config, **config, "model_type": model_type}
    return replace(checkpoint, config=changed, style=_NO_HEAD)


def _qwen3_vl_embedding(vocabulary: Vocabulary) -> Checkpoint:
    return _without_head(qwen.QWEN3_VL.describe(vocabulary), "qwen3_vl_embedding")


EMBEDDERS: dict[str, Family] = {
    "qwen3_vl_embedding": Family(qwen.SPECIALS, _qwen3_vl_embedding),
}
