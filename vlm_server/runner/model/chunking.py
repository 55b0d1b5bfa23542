"""How much of a prompt has to be prefilled at once. Knows mlx-vlm's policies; knows no scheduler.

In most families a token sees those before it alone, and a prompt may be cut anywhere. In some a
picture's tokens see each other, or all of a prompt's do: mlx-vlm masks them rightly only in one
call that begins with the prompt. Those families are asked about each prompt.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


def atomic_prefill_tokens(model: Any, token_types: NDArray[np.int32]) -> int:
    """How many of a prompt's first tokens have to be prefilled at once; 0 for one to cut anywhere.

    token_types: (tokens,), see `PreparedPrompt`. That is up to the last picture's end if the
    family lets what is behind it be cut, else all.
    """
    if may_be_cut(model, token_types):
        return 0
    media = np.flatnonzero(token_types)
    end = int(media[-1]) + 1 if len(media) else 0
    return end if end and may_be_cut(model, token_types[end:]) else len(token_types)


def may_be_cut(model: Any, token_types: NDArray[np.int32]) -> bool:
    """Whether mlx-vlm would prefill such tokens in chunks; may be called on any thread."""
    for module in (model, model.language_model):
        if (policy := getattr(module, "chunked_prefill_policy", None)) is not None:
            types = {"mm_token_type_ids": mx.array(token_types)[None]}
            answer = policy(prefill_kwargs=types)
            return bool(getattr(answer, "enabled", answer))
    modules = (model, model.language_model)
    return not any(getattr(module, "no_chunked_prefill", False) for module in modules)
