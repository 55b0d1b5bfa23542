"""A correction of mlx-vlm's GLM-5 Next: no keys and values beside the latents they follow from.

mlx-vlm keeps them of some chunks of a prompt, to compute fewer in the next one; rows of a batch of
which one has them, and another none, can't be joined.
"""

from __future__ import annotations

from typing import Any

from mlx_vlm.models.cache import ArraysCache, CacheList, KVCache, PoolingCache
from mlx_vlm.models.glm5_next.language import Glm5NextAttention

from vlm_server.runner.families.corrections import Settings, override


def correct(model: Any, _processor: Any, _settings: Settings) -> None:
    """Let layers compute keys and values from their latents in each chunk."""
    override(model.language_model, make_cache=_make_cache)
    for layer in model.language_model.layers:
        if layer.block_type != "linear_attention":
            override(layer.self_attn, __call__=_attend)


def _make_cache(self: Any) -> list[Any]:
    return [
        ArraysCache(size=2) if layer.block_type == "linear_attention" else _latents(layer.self_attn)
        for layer in self.layers
    ]


def _latents(attention: Any) -> CacheList:
    """Latents; with an index, also its keys, which are not padding, and pools of them."""
    if attention.indexer is None:
        return CacheList(KVCache())
    return CacheList(KVCache(), KVCache(), PoolingCache(attention.indexer.index_kpool))


def _attend(
    self: Any, x: Any, padding_mask: Any = None, cache: Any = None, *further: Any, **options: Any
) -> Any:
    without_keys = None if cache is None else (*cache.caches, None)
    return Glm5NextAttention.__call__(self, x, padding_mask, without_keys, *further, **options)
