"""Encodes images, or parts of a video, into the embedding rows that stand for them in a prompt."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from vlm_server.errors import InternalError, RequestError
from vlm_server.interfaces import EncodeWork, MediaInputs
from vlm_server.runner.device.arrays import DeviceErrors, to_numpy
from vlm_server.runner.encode.layers import by_layers
from vlm_server.runner.encode.tile_encoder import TileCache, encode_tiles
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.model.deepstack import Deepstack
from vlm_server.runner.vision.towers import TowerRows

logger = logging.getLogger(__name__)

_FAILED = "The model failed while encoding an image."
_TURN_SECONDS = 0.01
"""Time that an encode may add to a decode step: about a step's own time."""
_ENCODES_PER_MEASURE = 16
"""Encodes of one size that go by the time of a part, before it is measured again."""
_MAX_SIZES = 256


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """The features of one span, which depend on the span's image or frames alone."""

    rows: mx.array
    """(span tokens, hidden): the span's rows of `inputs_embeds`."""
    visual_mask: mx.array | None
    """(span tokens,) bool: tokens that deepstack adds to; None without deepstack."""
    deepstack: mx.array | None
    """(layers, visual tokens, hidden); None without deepstack."""
    tokens_per_call: int | None = None

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @property
    def arrays(self) -> list[mx.array]:
        arrays = (self.rows, self.visual_mask, self.deepstack)
        return [array for array in arrays if array is not None]


class ImageEncoder:
    """The `Encoder` of one model, for a thread and a stream of its own.

    It writes no state of the model, which another thread may run concurrently.
    """

    def __init__(self, loaded: LoadedModel, tiles: TileCache | None = None) -> None:
        """`tiles`: None to encode images as a whole, even where tiles would be exact."""
        self._loaded = loaded
        self._tiles = tiles
        self._part_times = PartTimes()

    def encode(self, encodes: Sequence[EncodeWork]) -> Sequence[ImageFeatures]:
        """The features of spans of one size, in order; the arrays are evaluated.

        Raises the errors of `ImageEncoding.result`.
        """
        return self.begin(encodes).result()

    def begin(self, encodes: Sequence[EncodeWork]) -> ImageEncoding:
        """An encoding of spans of one size, not launched yet; several for `takes_several` only.

        It is one call of the vision tower, or a call for each tile.
        """
        return ImageEncoding(
            self._loaded.errors,
            _parts(self._loaded, encodes, self._tiles),
            self._part_times,
            sum(encode.num_tokens for encode in encodes),
        )


Parts = Generator[list[mx.array], None, Sequence[ImageFeatures]]
"""The computation of features, which yields lazy arrays to evaluate in turn."""


@dataclass(slots=True)
class _Measured:
    """The last two times of a part, and how many encodes went by them."""

    seconds: tuple[float, ...] = ()
    num_uses: int = 0


class PartTimes:
    """The times of parts, by the number of tokens in their call.

    The first part of a size may compile kernels, so each size is measured at least twice.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Measured] = {}

    def record(self, num_tokens: int, seconds: float) -> None:
        """Record the time of a part."""
        if len(self._sizes) == _MAX_SIZES:
            self._sizes.clear()
        earlier_seconds = self._sizes.get(num_tokens, _Measured()).seconds
        self._sizes[num_tokens] = _Measured((*earlier_seconds[-1:], seconds))

    def expected_seconds(self, num_tokens: int) -> float | None:
        """The time of a part; None if it should be measured."""
        measured = self._sizes.get(num_tokens)
        if measured is None or len(measured.seconds) < 2:
            return None
        if measured.num_uses == _ENCODES_PER_MEASURE:
            return None
        measured.num_uses += 1
        return min(measured.seconds)


class ImageEncoding:
    """The `EncodeCall` of spans of one size."""

    def __init__(
        self, device_errors: DeviceErrors, parts: Parts, part_times: PartTimes, num_tokens: int
    ) -> None:
        """num_tokens: of all spans together."""
        self._device_errors = device_errors
        self._parts = parts
        self._part_times = part_times
        self._num_tokens = num_tokens
        self._launched: list[mx.array] = []
        """The arrays of the last `advance`."""
        self._part_seconds = part_times.expected_seconds(num_tokens)
        """None if it is to be measured."""
        self._features: Sequence[ImageFeatures] | None = None
        """None before the last part."""
        self._are_finite = mx.array(True)

    def advance(self) -> bool:
        """Launch parts of about `_TURN_SECONDS`, and wait for the parts that were launched before.

        Where errors come late, waits for the new parts, too. False if nothing is left. Raises
        OutOfMemory, StepTooLong, and InternalError for other failures.
        """
        previous = self._launched
        with self._request_errors():
            if self._part_seconds is None:
                self._launched = self._next_parts(self._measure() - 2)
            else:
                self._launched = self._next_parts(_parts_in_a_turn(self._part_seconds))
            mx.async_eval(self._launched)  # type: ignore[no-untyped-call]
            mx.eval(self._launched if self._device_errors.are_late else previous)
        return self._features is None

    def result(self) -> Sequence[ImageFeatures]:
        """Wait for the features, in order; the arrays are evaluated.

        Raises the errors of `advance`, and InternalError for features that are not finite, which
        would be cached.
        """
        while self._features is None:
            self.advance()
        with self._request_errors():
            mx.eval(self._launched)
            is_finite = bool(to_numpy(self._are_finite))
        if not is_finite:
            raise InternalError("The features of an image are not finite.")
        return self._features

    @contextmanager
    def _request_errors(self) -> Iterator[None]:
        try:
            yield
        except RequestError:
            raise
        except Exception as error:
            logger.exception("encoding an image failed")
            raise self._device_errors.request_error(error, _FAILED) from error

    def _measure(self) -> float:
        """Run the first two parts; returns the number of parts in a turn.

        The first one also copies the pixels to the device, so the second is measured.
        """
        mx.eval(self._next_parts(1))
        second_part = self._next_parts(1)
        started_at = time.perf_counter()
        mx.eval(second_part)
        self._part_seconds = time.perf_counter() - started_at
        self._part_times.record(self._num_tokens, self._part_seconds)
        return _parts_in_a_turn(self._part_seconds)

    def _next_parts(self, count: float) -> list[mx.array]:
        """The arrays of the next `count` parts, or of all that are left."""
        arrays = []
        while count > 0 and self._features is None:
            arrays += self._next_part()
            count -= 1
        return arrays

    def _next_part(self) -> list[mx.array]:
        """The arrays of the next part; the last are the features, and whether they are finite."""
        try:
            return next(self._parts)
        except StopIteration as end:
            features: Sequence[ImageFeatures] = end.value
            arrays = [array for image in features for array in image.arrays]
            numbers = [array for array in arrays if array.dtype != mx.bool_]
            self._are_finite = mx.all(mx.stack([mx.all(mx.isfinite(array)) for array in numbers]))
            self._features = features
            return [self._are_finite, *arrays]


def _parts_in_a_turn(part_seconds: float) -> float:
    return max(1.0, _TURN_SECONDS / part_seconds)


def _parts(loaded: LoadedModel, encodes: Sequence[EncodeWork], cache: TileCache | None) -> Parts:
    features: Sequence[ImageFeatures]
    token_ids = [encode.token_ids for encode in encodes]
    tiling = loaded.tiling if len(encodes) == 1 else None
    tiles = [] if tiling is None else tiling.split(encodes[0].inputs)
    if tiling is not None and cache is not None and len(tiles) > 1:
        rows, tokens_per_call = yield from encode_tiles(loaded, tiling, cache, encodes[0], tiles)
        features = [_of_tiles(loaded, token_ids[0], rows, tokens_per_call)]
    elif loaded.family.tower is None:
        features = yield from _by_family(loaded, token_ids, _join_inputs(encodes))
    else:
        tower = loaded.model.vision_tower.encode_inputs(_join_inputs(encodes))
        while tower.parts:
            yield [tower.parts.pop(0)]
        spans = zip(token_ids, tower.split(len(encodes)), strict=True)
        features = [_with_texts(loaded, ids, rows) for ids, rows in spans]
    for image, ids in zip(features, token_ids, strict=True):
        _check_count(image.rows.shape[0], len(ids))
    return features


def _join_inputs(encodes: Sequence[EncodeWork]) -> MediaInputs:
    first, *other_inputs = (encode.inputs for encode in encodes)
    if not other_inputs:
        return first
    return {
        name: np.concatenate([inputs[name] for inputs in (first, *other_inputs)]) for name in first
    }


def _with_texts(
    loaded: LoadedModel, token_ids: NDArray[np.int32], tower_rows: TowerRows
) -> ImageFeatures:
    """The tower's rows, with the embeddings of text tokens within the span."""
    is_visual = np.isin(token_ids, loaded.spec.media_token_ids)
    _check_count(tower_rows.rows.shape[0], int(is_visual.sum()))
    rows = tower_rows.rows
    if not is_visual.all():  # timestamps between the frame groups of a video
        rows = loaded.language_model.model.embed_tokens(mx.array(token_ids))
        rows[mx.array(np.flatnonzero(is_visual))] = tower_rows.rows.astype(rows.dtype)
    if not tower_rows.deepstack:
        return ImageFeatures(rows, None, None)
    return ImageFeatures(rows, mx.array(is_visual), mx.stack(tower_rows.deepstack))


def _of_tiles(
    loaded: LoadedModel, token_ids: NDArray[np.int32], tile_rows: mx.array, tokens_per_call: int
) -> ImageFeatures:
    """The tiles' rows, with the embeddings of the text between them."""
    is_visual = np.isin(token_ids, loaded.spec.media_token_ids)
    _check_count(tile_rows.shape[-2], int(is_visual.sum()))
    places = mx.array(np.flatnonzero(is_visual))
    rows = loaded.model.get_input_embeddings(mx.array(token_ids)[None]).inputs_embeds[0]
    tile_rows = tile_rows.astype(rows.dtype)
    if tile_rows.ndim == 2:
        rows[places] = tile_rows
        return ImageFeatures(rows, None, None, tokens_per_call)
    rows[places] = 0
    deepstack = mx.zeros((len(tile_rows), *rows.shape), dtype=rows.dtype)
    deepstack[:, places] = tile_rows
    return ImageFeatures(rows, mx.array(is_visual), deepstack, tokens_per_call)


def _by_family(
    loaded: LoadedModel, token_ids: Sequence[NDArray[np.int32]], inputs: MediaInputs
) -> Parts:
    """Features by `get_input_embeddings` on the spans' tokens.

    Every family of mlx-vlm has this call, which includes all processing of an image's features.
    """
    features = yield from by_layers(loaded, lambda: _embeddings(loaded, token_ids, inputs))
    if len(token_ids) == 1:
        return [features]
    assert features.deepstack is None
    rows = features.rows.reshape(len(token_ids), -1, features.rows.shape[-1])
    return [ImageFeatures(mx.contiguous(part), None, None) for part in rows]


def _embeddings(
    loaded: LoadedModel, token_ids: Sequence[NDArray[np.int32]], inputs: MediaInputs
) -> ImageFeatures:
    stand_in = loaded.spec.stand_in
    span_ids = np.concatenate(token_ids)
    if stand_in is not None:
        span_ids = np.fromiter([stand_in.model_id, 0], dtype=np.int32)  # and a text token
    ids = mx.array(span_ids)[None]
    arrays = {key: mx.array(value) for key, value in inputs.items()}
    pixel_values = arrays.pop("pixel_values", None)  # videos use another name
    with loaded.position_lock:
        embeddings = loaded.model.get_input_embeddings(
            ids, pixel_values, mask=mx.ones_like(ids), **arrays
        )
        loaded.forget_positions()
    deepstack = embeddings.deepstack_visual_embeds
    if loaded.family.deepstack is Deepstack.ALL_ROWS and deepstack is not None:
        is_visual = np.flatnonzero(to_numpy(embeddings.visual_pos_masks[0]))
        deepstack = deepstack[0, mx.array(is_visual)].transpose(1, 0, 2)
    return ImageFeatures(
        rows=embeddings.inputs_embeds[0] if stand_in is None else embeddings.inputs_embeds[0, :-1],
        visual_mask=None if deepstack is None else embeddings.visual_pos_masks[0],
        deepstack=None if deepstack is None else mx.stack(list(deepstack)),
    )


def _check_count(num_rows: int, num_tokens: int) -> None:
    if num_rows != num_tokens:
        raise InternalError(f"an image's {num_tokens} tokens got {num_rows} rows of features")
