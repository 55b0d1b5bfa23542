"""Rotary positions of prompts with pictures and videos. Knows M-RoPE families; others need none.

Families with M-RoPE give every token three positions, and after a picture the positions run
behind the token count by a delta. What a medium's tokens get follows from the medium and from
where it begins, so mlx-vlm is asked once for each medium alone, and not for every prompt that
shows it. mlx-vlm keeps positions on the language model between calls; here they belong to a
request and are always passed in, and the model's own are cleared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


def has_positions(language_model: Any) -> bool:
    """Whether this family's tokens have three positions."""
    return hasattr(language_model, "get_rope_index")


def medium_positions(
    language_model: Any, token_ids: NDArray[np.int32], grids: Mapping[str, NDArray[Any]]
) -> NDArray[np.int32]:
    """Positions of one medium's tokens, (3, tokens), from the place where they begin.

    `grids` is its size (`image_grid_thw` or `video_grid_thw`). Leaves alone what the family
    keeps on the module, and may be called on any thread.
    """
    begin = [language_model.config.vision_start_token_id]  # by which families find media
    arrays = {name: mx.array(rows) for name, rows in grids.items()}
    ids = mx.array(np.concatenate([begin, token_ids]).astype(np.int32))[None]
    found, _ = language_model.get_rope_index(ids, **arrays)
    positions = np.array(found, dtype=np.int32).reshape(-1, len(token_ids) + 1)
    return np.broadcast_to(positions[:, 1:] - 1, (3, len(token_ids)))


def prompt_positions(
    num_tokens: int, media: Sequence[tuple[int, NDArray[np.int32]]]
) -> tuple[NDArray[np.int32], int]:
    """Positions of a prompt, (3, tokens), and how far those after it run behind the count.

    `media` are the first token and the positions of each, see `medium_positions`, in order.
    """
    positions = np.empty((3, num_tokens), dtype=np.int32)
    cursor = position = 0
    for start, own in [*media, (num_tokens, np.zeros((3, 0), dtype=np.int32))]:
        positions[:, cursor:start] = np.arange(position, position + start - cursor)
        position, cursor = position + start - cursor, start + own.shape[1]
        positions[:, start:cursor] = position + own
        position += int(own.max(initial=-1)) + 1
    return positions, position - num_tokens


def forget_positions(language_model: Any) -> None:
    """Clear what the family keeps on the module, so that no request meets another's."""
    for name in ("_position_ids", "_rope_deltas"):
        if hasattr(language_model, name):
            setattr(language_model, name, None)
