"""Encodes images tile by tile, and only tiles that are not cached."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial

import mlx.core as mx
import numpy as np

from vlm_server.cache.lru import LruCache
from vlm_server.cache.prompt_key import inputs_hash
from vlm_server.errors import InternalError
from vlm_server.interfaces import EncodeWork, MediaInputs
from vlm_server.runner.device.arrays import to_numpy
from vlm_server.runner.encode.layers import by_layers
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.vision.tiles import Tiling

TileCache = LruCache[mx.array]


def encode_tiles(
    loaded: LoadedModel,
    tiling: Tiling,
    cache: TileCache,
    work: EncodeWork,
    tiles: Sequence[MediaInputs],
) -> Generator[list[mx.array], None, tuple[mx.array, int]]:
    """The rows of an image's tokens: (tokens, hidden), or (layers, tokens, hidden).

    Also returns the number of tokens of an encoded tile; 0 if all were cached. Yields lazy arrays
    to evaluate in turn. Raises InternalError for features that are not finite, which are not
    cached.
    """
    keys = [inputs_hash(tile, work.prompt.cache_salt) for tile in tiles]
    image_token_id = loaded.spec.image_token_id
    assert image_token_id is not None
    num_tokens = int(np.isin(work.token_ids, loaded.spec.media_token_ids).sum()) // len(tiles)
    # Looked up before any new tile could displace them.
    cached = {key: cache.get(key) for key in dict.fromkeys(keys)}
    rows = {key: array for key, array in cached.items() if array is not None}
    are_finite = dict[str, mx.array]()
    for key, tile in zip(keys, tiles, strict=True):
        if key not in rows:
            encode = partial(tiling.encode, loaded.model, tile, image_token_id, num_tokens)
            rows[key] = yield from by_layers(loaded, encode)
            are_finite[key] = mx.all(mx.isfinite(rows[key]))
            yield [rows[key], are_finite[key]]
    image_rows = tiling.join(loaded.model, [rows[key] for key in keys], work.inputs)
    for key, is_finite in are_finite.items():
        if not to_numpy(is_finite):
            raise InternalError("The features of an image are not finite.")
        cache.put(key, rows[key], rows[key].nbytes).release()
    return image_rows, max((rows[key].shape[-2] for key in are_finite), default=0)
