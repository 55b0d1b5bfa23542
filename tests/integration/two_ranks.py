"""`python -m tests.integration.two_ranks FOLDER...`: one of two ranks, told on standard input.

For each checkpoint rank 0 prints the largest difference between the scores of a prompt that all
ranks computed and those that one process did, and the largest score.
"""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import msgspec
from mlx_vlm.models.cache import make_prompt_cache

from vlm_server.protocol.commands import Rank
from vlm_server.runner.device.device import current_device
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.loading.load import load
from vlm_server.runner.ranks import Ranks
from vlm_server.settings import ModelSettings

_LIMIT_BYTES = 1 << 30
_TOKENS = 40


def main() -> None:
    rank = msgspec.json.decode(sys.stdin.buffer.readline(), type=Rank)
    rank.enter()
    ranks = Ranks.join(rank)
    for folder in sys.argv[1:]:
        settings, device = ModelSettings(path=folder), current_device()
        parted = scores(load(settings, device, _LIMIT_BYTES, ranks))
        whole = scores(load(settings, device, _LIMIT_BYTES))
        if ranks.leads:
            difference, largest = mx.abs(parted - whole).max(), mx.abs(whole).max()
            print(Path(folder).name, difference.item(), largest.item(), flush=True)


def scores(loaded: LoadedModel) -> mx.array:
    """Logits of a prompt's second chunk: (tokens, vocabulary)."""
    token_ids = mx.arange(3, 3 + _TOKENS)[None] % 100
    cache = make_prompt_cache(loaded.language_model)
    half = _TOKENS // 2
    made = [loaded.language_model(part, cache=cache) for part in mx.split(token_ids, 2, axis=1)]
    logits = made[1].logits[0].astype(mx.float32)
    mx.eval(logits)
    assert cache[0].offset == 2 * half
    loaded.forget_positions()
    return logits


if __name__ == "__main__":
    main()
