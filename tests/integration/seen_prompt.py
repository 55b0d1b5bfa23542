"""Random tokens that a model and its draft head have seen."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.model.lm_head import WantedLogits, logits_of


class SeenPrompt:
    """`layers`: all KV of the tokens. `hidden`: the state before `newest`, (1, 1, hidden)."""

    def __init__(self, loaded: LoadedModel, count: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.token_ids = mx.array(rng.integers(5, 340, size=(1, count)))
        self.layers = loaded.new_layers()
        with logits_of(loaded.language_model, WantedLogits()) as seen:
            cache = loaded.model_layers(self.layers)
            logits = loaded.language_model(self.token_ids, cache=cache).logits
        loaded.forget_positions()
        assert seen.all is not None
        assert loaded.draft_head is not None
        head_layers = loaded.head_layers(self.layers)
        loaded.draft_head.append_chunk(self.token_ids, {}, seen.all, None, head_layers)
        self.hidden = seen.all[:, -1:]
        self.newest = int(mx.argmax(logits[0, -1]).item())
