"""Encodes pictures tile by tile, and only the tiles that no picture before had."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from vlm_server.cache.lru import Lease, LruCache
from vlm_server.errors import InternalError
from vlm_server.ports import EncodeWork, MediaInputs
from vlm_server.runner.device.arrays import read
from vlm_server.runner.model.load import LoadedModel
from vlm_server.runner.vision.tiles import Tiling, tile_key

TileCache = LruCache[mx.array]


@dataclass(frozen=True, slots=True)
class TiledRows:
    """What stands for the image tokens of a picture.

    rows: (tokens, hidden), or (layers, tokens, hidden) for deepstack. tokens_at_once: of a tile
    that was encoded; 0 if all were known.
    """

    rows: mx.array
    tokens_at_once: int


class TileEncoder:
    """For a family with tiles. All calls come from one thread."""

    def __init__(self, loaded: LoadedModel, tiling: Tiling, cache: TileCache) -> None:
        self._loaded = loaded
        self._tiling = tiling
        self._cache = cache

    def encode(self, work: EncodeWork) -> TiledRows | None:
        """A picture's rows; None if it is not cut into tiles.

        Raises InternalError for features that are not finite, which are not stored.
        """
        tiles = self._tiling.split(work.inputs)
        if len(tiles) < 2:
            return None
        keys = [tile_key(tile, work.prompt.cache_salt) for tile in tiles]
        token_ids = work.prompt.token_ids[work.span.start : work.span.end]
        num_tokens = int(np.isin(token_ids, self._loaded.host.media_token_ids).sum())
        at_once = 0
        leases = self._stored(keys)  # first of all, so that no new tile displaces them
        try:
            for key, tile in zip(keys, tiles, strict=True):
                if key not in leases:
                    rows = self._encode_one(tile, num_tokens // len(tiles))
                    leases[key] = self._cache.put(key, rows, rows.nbytes)
                    at_once = max(at_once, rows.shape[-2])
            rows_of_tiles = [leases[key].value for key in keys]
            joined = self._tiling.join(self._loaded.model, rows_of_tiles, work.inputs)
            return TiledRows(joined, at_once)
        finally:
            for lease in leases.values():
                lease.release()

    def _stored(self, keys: list[str]) -> dict[str, Lease[mx.array]]:
        found = {key: self._cache.lease(key) for key in dict.fromkeys(keys)}
        return {key: lease for key, lease in found.items() if lease is not None}

    def _encode_one(self, tile: MediaInputs, num_tokens: int) -> mx.array:
        loaded = self._loaded
        rows = self._tiling.encode(loaded.model, tile, loaded.host.image_token_id, num_tokens)
        is_finite = mx.all(mx.isfinite(rows))
        mx.eval(rows, is_finite)
        if not read(is_finite):
            raise InternalError("The features of an image are not finite.")
        return rows
