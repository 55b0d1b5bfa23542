"""Tilings: how families cut images into tiles that are encoded independently of each other.

Each tile is encoded by one call of one shape. So its features are the same bits in every image,
and whether or not they come from a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mlx.core as mx

from vlm_server.interfaces import MediaInputs

_PIXELS = "pixel_values"
_OF_EACH_TILE = frozenset({_PIXELS, "pixel_attention_mask", "spatial_shapes"})
_OF_ANY_TILE = frozenset({"image_token_index"})
_OF_THE_IMAGE = frozenset({"image_sizes", "batch_num_images", "num_patches_list"})


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiling of a family whose features of an image are its tiles' in order.

    axis: the axis of tiles in the processor's arrays.
    """

    axis: int

    def split(self, inputs: MediaInputs) -> list[MediaInputs]:
        """The inputs of each tile; empty if `inputs` are of no tiles."""
        if _PIXELS not in inputs or not inputs.keys() <= (
            _OF_EACH_TILE | _OF_ANY_TILE | _OF_THE_IMAGE
        ):
            return []
        tile_inputs = {name: array for name, array in inputs.items() if name in _OF_EACH_TILE}
        shared = {name: array for name, array in inputs.items() if name in _OF_ANY_TILE}
        before = (slice(None),) * self.axis
        return [
            {name: array[(*before, slice(at, at + 1))] for name, array in tile_inputs.items()}
            | shared
            for at in range(inputs[_PIXELS].shape[self.axis])
        ]

    def encode(self, model: Any, tile: MediaInputs, token_id: int, num_tokens: int) -> mx.array:
        """A tile's features, lazy: (tokens, hidden), or (layers, tokens, hidden) for deepstack.

        num_tokens: tokens of the tile, if all tiles are equal; the family gets a prompt of these
        alone.
        """
        rows: mx.array = _embed_tile(model, tile, token_id, num_tokens).inputs_embeds[0]
        return rows

    def join(self, model: Any, tiles: list[mx.array], inputs: MediaInputs) -> mx.array:
        """The features of an image's tokens, from those of each tile."""
        return mx.concatenate(tiles)


class UnequalTiling(Tiling):
    """LFM2-VL: tiles, and a smaller copy of the image, which has fewer tokens."""

    def encode(self, model: Any, tile: MediaInputs, token_id: int, num_tokens: int) -> mx.array:
        arrays = {name: mx.array(array) for name, array in tile.items()}
        return model.encode_images(arrays.pop(_PIXELS), **arrays)[0]  # type: ignore[no-any-return]


class PackedTiling(Tiling):
    """LLaVA-OneVision: tiles become one image, without its padding, whose rows end with newlines.

    The whole image, as a tile, comes before them.
    """

    def encode(self, model: Any, tile: MediaInputs, token_id: int, num_tokens: int) -> mx.array:
        pixels = mx.array(tile[_PIXELS])[0].transpose(0, 2, 3, 1)
        *_, hidden_states = model.vision_tower(pixels, output_hidden_states=True)
        rows: mx.array = model.multi_modal_projector(model._select_features(hidden_states))
        return rows[0]

    def join(self, model: Any, tiles: list[mx.array], inputs: MediaInputs) -> mx.array:
        sizes = inputs["image_sizes"].reshape(-1, 2).tolist()
        return model.pack_image_features([mx.stack(tiles)], sizes)[0]  # type: ignore[no-any-return]


class LayeredTiling(Tiling):
    """Granite 4 Vision: packed tiles for each of several layers of the decoder."""

    def encode(self, model: Any, tile: MediaInputs, token_id: int, num_tokens: int) -> mx.array:
        """Without `image_sizes` nothing is packed, and no newline added."""
        side = model.config.vision_config.image_size // model.config.vision_config.patch_size
        tokens_per_tile = int(side * Fraction(model.config.downsample_rate)) ** 2
        rows: mx.array = _embed_tile(model, tile, token_id, tokens_per_tile).deepstack_visual_embeds
        return rows

    def join(self, model: Any, tiles: list[mx.array], inputs: MediaInputs) -> mx.array:
        strategy = model.config.vision_feature_select_strategy
        layers = []
        for layer in range(tiles[0].shape[0]):
            together = mx.stack([tile[layer] for tile in tiles])
            (rows,) = model._pack_and_unpad_image_features(
                [together], inputs["image_sizes"].tolist(), strategy
            )
            layers.append(rows)
        return mx.stack(layers)


def _embed_tile(model: Any, tile: MediaInputs, token_id: int, num_tokens: int) -> Any:
    """The model's embeddings of a tile as an image of its own."""
    arrays = {name: mx.array(array) for name, array in tile.items()}
    ids = mx.full((1, num_tokens), token_id, dtype=mx.int32)
    return model.get_input_embeddings(ids, arrays.pop(_PIXELS), mask=mx.ones_like(ids), **arrays)
