"""Rotary positions of prompts with pictures and videos. Knows M-RoPE families; others need none.

Families with M-RoPE give every token three positions, and after a picture the positions run
behind the token count by a delta. mlx-vlm keeps both on the language model between calls;
here they belong to a request and are always passed in, and the model's own are cleared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_server.ports import PreparedPrompt


@dataclass(frozen=True, slots=True)
class Positions:
    """position_ids: (3, 1, tokens) of a prompt; a later token n stands at n + `delta`."""

    position_ids: mx.array
    delta: int


def prompt_positions(language_model: Any, prompt: PreparedPrompt) -> Positions | None:
    """The positions of a whole prompt; None for families that count tokens."""
    if not hasattr(language_model, "get_rope_index"):
        return None
    ids = mx.array(prompt.token_ids)[None]
    grids = {name: mx.array(rows) for name, rows in prompt.grids.items()}
    position_ids, deltas = language_model.get_rope_index(ids, **grids)
    forget_positions(language_model)
    if position_ids.ndim == 2:
        position_ids = mx.broadcast_to(position_ids[None], (3, *position_ids.shape))
    mx.eval(position_ids)
    return Positions(position_ids, int(np.array(deltas).reshape(-1)[0]))


def forget_positions(language_model: Any) -> None:
    """Clear what the family keeps on the module, so that no request meets another's."""
    for name in ("_position_ids", "_rope_deltas"):
        if hasattr(language_model, name):
            setattr(language_model, name, None)
