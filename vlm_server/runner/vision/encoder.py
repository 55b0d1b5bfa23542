"""Encodes images, or parts of a video, into the embedding rows that stand for them in a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from vlm_server.errors import InternalError, OutOfMemory
from vlm_server.ports import EncodeWork, MediaInputs
from vlm_server.runner.device.arrays import read
from vlm_server.runner.device.memory import NO_MEMORY, is_out_of_memory
from vlm_server.runner.model.families import Deepstack
from vlm_server.runner.model.load import LoadedModel
from vlm_server.runner.vision.tile_encoder import TileCache, TiledRows, TileEncoder
from vlm_server.runner.vision.towers import TowerRows


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """What the model makes of one span; it depends on the span's image or frames alone.

    rows: (span tokens, hidden), the span's rows of `inputs_embeds`.
    visual_mask: (span tokens,) bool, which of them deepstack adds to; None without deepstack.
    deepstack: (layers, visual tokens, hidden); None without deepstack.
    tokens_at_once: see `EncodedImage`.
    """

    rows: mx.array
    visual_mask: mx.array | None
    deepstack: mx.array | None
    tokens_at_once: int | None = None

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @property
    def arrays(self) -> list[mx.array]:
        made = (self.rows, self.visual_mask, self.deepstack)
        return [array for array in made if array is not None]


def new_encoder(loaded: LoadedModel, tiles: TileCache) -> ImageEncoder:
    """Its encoder, tile by tile where that is exact and costs nothing."""
    tiling = loaded.tiling
    return ImageEncoder(loaded, None if tiling is None else TileEncoder(loaded, tiling, tiles))


class ImageEncoder:
    """The `Encoder` of one model. May work on a thread and a stream of its own.

    Another thread runs the language model meanwhile, so nothing that they share is written.
    """

    def __init__(self, loaded: LoadedModel, tiles: TileEncoder | None = None) -> None:
        """`tiles` encodes what is cut into tiles; without, all of a picture is encoded at once."""
        self._loaded = loaded
        self._tiles = tiles

    def encode(self, works: Sequence[EncodeWork]) -> Sequence[ImageFeatures]:
        """The features of spans of one size, in order; the arrays are evaluated.

        Raises what `begin` and `ImageEncoding.result` do.
        """
        return self.begin(works).result()

    def begin(self, works: Sequence[EncodeWork]) -> ImageEncoding:
        """What is to be computed of spans of one size; nothing of it is launched.

        But what the host computes, and tiles. Raises OutOfMemory, and InternalError if the rows are
        not as many as the tokens.
        """
        with _memory_errors():
            return begin_encode(self._loaded, works, self._tiles)


class ImageEncoding:
    """The `Encoding` of spans of one size."""

    def __init__(self, features: Sequence[ImageFeatures], parts: Sequence[mx.array] = ()) -> None:
        """`parts`: what is computed one after the other on the way to `features`, all lazy."""
        self._features = features
        made = [
            array for each in features for array in (each.rows, each.deepstack) if array is not None
        ]
        self._are_finite = mx.all(mx.stack([mx.all(mx.isfinite(array)) for array in made]))
        last = [self._are_finite, *(array for each in features for array in each.arrays)]
        self._left = [*([part] for part in parts), last]
        self._launched: list[mx.array] = []
        """The last part that was."""

    def advance(self) -> bool:
        """Launch the next part, and wait for the one before: the device has work meanwhile.

        False if nothing is left. Raises OutOfMemory.
        """
        before, self._launched = self._launched, self._left.pop(0)
        with _memory_errors():
            mx.async_eval(self._launched)  # type: ignore[no-untyped-call]
            mx.eval(before)
        return bool(self._left)

    def result(self) -> Sequence[ImageFeatures]:
        """Wait for the features, in order; the arrays are evaluated.

        Raises OutOfMemory, and InternalError if they are not finite: such features would be cached
        for everybody who shows this image.
        """
        with _memory_errors():
            mx.eval(self._left, self._are_finite, [each.arrays for each in self._features])
        if not read(self._are_finite):
            raise InternalError("The features of an image are not finite.")
        return self._features


@contextmanager
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemory(NO_MEMORY) from error
        raise


def encode_image(
    loaded: LoadedModel, work: EncodeWork, tiles: TileEncoder | None = None
) -> ImageFeatures:
    """The features of one span; see `ImageEncoder.encode`."""
    return begin_encode(loaded, [work], tiles).result()[0]


def begin_encode(
    loaded: LoadedModel, works: Sequence[EncodeWork], tiles: TileEncoder | None = None
) -> ImageEncoding:
    """One call of the vision tower on the media of spans of one size, lazy.

    Raises InternalError if there are not as many rows as tokens. Several only for a family that
    `takes_several`.
    """
    if len(works) == 1:
        return _begin_one(loaded, works[0], tiles)
    inputs = {
        name: np.concatenate([work.inputs[name] for work in works]) for name in works[0].inputs
    }
    token_ids = [_token_ids(work) for work in works]
    if loaded.family.tower is None:
        made = _by_family(loaded, np.concatenate(token_ids), inputs)
        rows, rest = divmod(made.rows.shape[0], len(works))
        assert made.deepstack is None
        assert not rest
        parts = [made.rows[start * rows : (start + 1) * rows] for start in range(len(works))]
        features = [ImageFeatures(mx.contiguous(part), None, None) for part in parts]
        return _encoding(features, token_ids)
    tower = loaded.model.vision_tower.encode_inputs(inputs)
    each = zip(token_ids, tower.split(len(works)), strict=True)
    features = [_with_texts(loaded, ids, rows) for ids, rows in each]
    return _encoding(features, token_ids, tower.parts)


def _begin_one(loaded: LoadedModel, work: EncodeWork, tiles: TileEncoder | None) -> ImageEncoding:
    token_ids = _token_ids(work)
    tiled = None if tiles is None else tiles.encode(work)
    if tiled is not None:
        return _encoding([_by_tiles(loaded, token_ids, tiled)], [token_ids])
    if loaded.family.tower is None:
        return _encoding([_by_family(loaded, token_ids, work.inputs)], [token_ids])
    tower = loaded.model.vision_tower.encode_inputs(work.inputs)
    return _encoding([_with_texts(loaded, token_ids, tower)], [token_ids], tower.parts)


def _token_ids(work: EncodeWork) -> NDArray[np.int32]:
    return work.prompt.token_ids[work.span.start : work.span.end]


def _encoding(
    features: Sequence[ImageFeatures],
    token_ids: Sequence[NDArray[np.int32]],
    parts: Sequence[mx.array] = (),
) -> ImageEncoding:
    """Raises InternalError if there are not as many rows as tokens."""
    for each, ids in zip(features, token_ids, strict=True):
        _check_count(each.rows.shape[0], len(ids))
    return ImageEncoding(features, parts)


def _with_texts(
    loaded: LoadedModel, token_ids: NDArray[np.int32], made: TowerRows
) -> ImageFeatures:
    """The tower's rows; the span's text tokens, if any, keep their own embeddings."""
    is_visual = np.isin(token_ids, loaded.host.media_token_ids)
    _check_count(made.rows.shape[0], int(is_visual.sum()))
    rows = made.rows
    if not is_visual.all():  # timestamps between the frame groups of a video
        rows = loaded.language_model.model.embed_tokens(mx.array(token_ids))
        rows[mx.array(np.flatnonzero(is_visual))] = made.rows.astype(rows.dtype)
    if not made.deepstack:
        return ImageFeatures(rows, None, None)
    return ImageFeatures(rows, mx.array(is_visual), mx.stack(made.deepstack))


def _by_tiles(loaded: LoadedModel, token_ids: NDArray[np.int32], tiled: TiledRows) -> ImageFeatures:
    """The text between tiles keeps its own embeddings."""
    is_visual = np.isin(token_ids, loaded.host.media_token_ids)
    _check_count(tiled.rows.shape[-2], int(is_visual.sum()))
    places = mx.array(np.flatnonzero(is_visual))
    rows = loaded.model.get_input_embeddings(mx.array(token_ids)[None]).inputs_embeds[0]
    joined = tiled.rows.astype(rows.dtype)
    if joined.ndim == 2:
        rows[places] = joined
        return ImageFeatures(rows, None, None, tiled.tokens_at_once)
    rows[places] = 0
    deepstack = mx.zeros((len(joined), *rows.shape), dtype=rows.dtype)
    deepstack[:, places] = joined
    return ImageFeatures(rows, mx.array(is_visual), deepstack, tiled.tokens_at_once)


def _by_family(
    loaded: LoadedModel, token_ids: NDArray[np.int32], inputs: MediaInputs
) -> ImageFeatures:
    """By `get_input_embeddings` on the span's own tokens.

    The one call that every family of mlx-vlm has, whatever it does to an image's features before
    they enter the text.
    """
    stand_in = loaded.host.stand_in
    if stand_in is not None:
        token_ids = np.fromiter([stand_in.model_id, 0], dtype=np.int32)  # and a text's token
    ids = mx.array(token_ids)[None]
    arrays = {key: mx.array(value) for key, value in inputs.items()}
    pixel_values = arrays.pop("pixel_values", None)  # a video's have another name
    with loaded.position_lock:
        made = loaded.model.get_input_embeddings(
            ids, pixel_values, mask=mx.ones_like(ids), **arrays
        )
        loaded.forget_positions()
    deepstack = made.deepstack_visual_embeds
    if loaded.family.deepstack is Deepstack.ALL_ROWS and deepstack is not None:
        is_visual = np.flatnonzero(read(made.visual_pos_masks[0]))
        deepstack = deepstack[0, mx.array(is_visual)].transpose(1, 0, 2)
    return ImageFeatures(
        rows=made.inputs_embeds[0] if stand_in is None else made.inputs_embeds[0, :-1],
        visual_mask=None if deepstack is None else made.visual_pos_masks[0],
        deepstack=None if deepstack is None else mx.stack(list(deepstack)),
    )


def _check_count(num_rows: int, num_tokens: int) -> None:
    if num_rows != num_tokens:
        raise InternalError(f"a picture's {num_tokens} tokens got {num_rows} rows of features")
