"""Rotary positions of prompts with pictures and videos. Knows M-RoPE families; others need none.

Families with M-RoPE give every token three positions, and after a picture the positions run
behind the token count by a delta. mlx-vlm keeps both on the language model between calls;
here they belong to a request and are always passed in, and the model's own are cleared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


def prompt_positions(
    language_model: Any, token_ids: NDArray[np.int32], grids: Mapping[str, NDArray[Any]]
) -> tuple[NDArray[np.int32] | None, int]:
    """Positions of a whole prompt, (3, tokens), and how far those after it run behind the count.

    None and 0 for families that count tokens. `grids` has a row for each picture
    (`image_grid_thw`) and each video (`video_grid_thw`). Leaves alone what the family keeps on
    the module, and may be called on any thread.
    """
    if not hasattr(language_model, "get_rope_index"):
        return None, 0
    with mx.stream(mx.cpu):  # many small steps, each read back
        arrays = {name: mx.array(rows) for name, rows in grids.items()}
        found, deltas = language_model.get_rope_index(mx.array(token_ids)[None], **arrays)
        positions = np.array(found, dtype=np.int32).reshape(-1, len(token_ids))
        delta = int(np.array(deltas).reshape(-1)[0])
    return np.broadcast_to(positions, (3, len(token_ids))), delta


def forget_positions(language_model: Any) -> None:
    """Clear what the family keeps on the module, so that no request meets another's."""
    for name in ("_position_ids", "_rope_deltas"):
        if hasattr(language_model, name):
            setattr(language_model, name, None)
