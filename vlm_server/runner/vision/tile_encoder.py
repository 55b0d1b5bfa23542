"""Encodes pictures tile by tile, and only the tiles that no picture before had."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from vlm_server.cache.lru import LruCache
from vlm_server.errors import InternalError
from vlm_server.interfaces import EncodeWork, MediaInputs
from vlm_server.runner.device.arrays import read
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.model.tiles import Tiling, tile_key
from vlm_server.runner.vision.layers import by_layers

TileCache = LruCache[mx.array]


@dataclass(frozen=True, slots=True)
class TiledRows:
    """The features of the image tokens of a picture.

    rows: (tokens, hidden), or (layers, tokens, hidden) for deepstack. tokens_at_once: of a tile
    that was encoded; 0 if all were known.
    """

    rows: mx.array
    tokens_at_once: int


Parts = Generator[list[mx.array], None, TiledRows]


class TileEncoder:
    """For a family with tiles. All calls come from one thread."""

    def __init__(self, loaded: LoadedModel, tiling: Tiling, cache: TileCache) -> None:
        self._loaded = loaded
        self._tiling = tiling
        self._cache = cache

    def encode(self, work: EncodeWork) -> Parts | None:
        """Computes a picture's rows; None if it is not cut into tiles.

        Yields what is to be evaluated on the way. Raises InternalError for features that are not
        finite, which are not stored.
        """
        tiles = self._tiling.split(work.inputs)
        return None if len(tiles) < 2 else self._encode(work, tiles)

    def _encode(self, work: EncodeWork, tiles: list[MediaInputs]) -> Parts:
        keys = [tile_key(tile, work.prompt.cache_salt) for tile in tiles]
        token_ids = work.prompt.token_ids[work.span.start : work.span.end]
        num_tokens = int(np.isin(token_ids, self._loaded.spec.media_token_ids).sum())
        rows = self._stored(keys)  # first of all, so that no new tile displaces them
        are_finite = dict[str, mx.array]()
        for key, tile in zip(keys, tiles, strict=True):
            if key not in rows:
                rows[key] = yield from self._encode_one(tile, num_tokens // len(tiles))
                are_finite[key] = mx.all(mx.isfinite(rows[key]))
                yield [rows[key], are_finite[key]]
        joined = self._tiling.join(self._loaded.model, [rows[key] for key in keys], work.inputs)
        for key, is_finite in are_finite.items():
            if not read(is_finite):
                raise InternalError("The features of an image are not finite.")
            self._cache.put(key, rows[key], rows[key].nbytes).release()
        return TiledRows(joined, max((rows[key].shape[-2] for key in are_finite), default=0))

    def _stored(self, keys: list[str]) -> dict[str, mx.array]:
        found = {key: self._cache.get(key) for key in dict.fromkeys(keys)}
        return {key: rows for key, rows in found.items() if rows is not None}

    def _encode_one(
        self, tile: MediaInputs, num_tokens: int
    ) -> Generator[list[mx.array], None, mx.array]:
        loaded, tiling = self._loaded, self._tiling
        token_id = loaded.spec.image_token_id
        return by_layers(loaded, lambda: tiling.encode(loaded.model, tile, token_id, num_tokens))
