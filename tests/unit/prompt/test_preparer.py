"""The chunk policy determines how many tokens have to be prefilled at once."""

from __future__ import annotations

import numpy as np
import pytest

from vlm_server.interfaces.model_spec import ChunkPolicy
from vlm_server.prompt.preparer import atomic_prefill_tokens

TEXT, MEDIA_LAST, TEXT_AFTER = [0, 0, 0], [0, 1, 1], [0, 1, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("policy", "token_types", "expected"),
    [
        (ChunkPolicy.ANYWHERE, TEXT, 0),
        (ChunkPolicy.ANYWHERE, TEXT_AFTER, 0),
        (ChunkPolicy.AFTER_MEDIA, TEXT, 0),
        (ChunkPolicy.AFTER_MEDIA, MEDIA_LAST, 3),
        (ChunkPolicy.AFTER_MEDIA, TEXT_AFTER, 4),
        (ChunkPolicy.NOWHERE, TEXT, 3),
        (ChunkPolicy.NOWHERE, TEXT_AFTER, 6),
    ],
)
def test_atomic_prefill_tokens_follow_chunk_policy(
    policy: ChunkPolicy, token_types: list[int], expected: int
):
    assert atomic_prefill_tokens(policy, np.array(token_types, dtype=np.int32)) == expected
