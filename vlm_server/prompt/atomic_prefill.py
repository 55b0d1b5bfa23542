"""How many of a prompt's tokens have to be prefilled in one chunk.

In most families a token sees only those before it, and a prefill chunk may end anywhere. In some
the tokens of an image see each other, or all tokens of a prompt do: mlx-vlm masks them correctly
only in one call that starts at the first token.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vlm_server.interfaces.model_spec import ChunkPolicy


def atomic_prefill_tokens(policy: ChunkPolicy, token_types: NDArray[np.int32]) -> int:
    """How many of a prompt's first tokens have to be prefilled at once; 0 for no such rule.

    token_types: (tokens,), see `PreparedPrompt`.
    """
    match policy:
        case ChunkPolicy.ANYWHERE:
            return 0
        case ChunkPolicy.AFTER_MEDIA:
            media = np.flatnonzero(token_types)
            return int(media[-1]) + 1 if len(media) else 0
        case ChunkPolicy.NOWHERE:
            return len(token_types)
