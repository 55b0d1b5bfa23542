"""What the language model reads of one prompt at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(slots=True)
class PromptChunk:
    """The next tokens of one prompt.

    token_ids: (1, tokens). inputs: further arguments of the model, with an entry for each token.
    cache: the prompt's layers, whose buffers have `capacity` columns once there are any.
    """

    token_ids: mx.array
    inputs: dict[str, Any]
    cache: list[Any]
    capacity: int
    logits: mx.array | None = None
    """Those of the last token, (1, 1, vocabulary), lazy; None until it was launched."""

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[1]
