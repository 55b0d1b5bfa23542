"""The KV that engines store, column by column, to compare how it was computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tests.integration.harness import EngineHarness, caches_of
from vlm_server.cache.caches import Caches
from vlm_server.runner.device.arrays import to_numpy

_ROUNDING = 2e-3
"""Of numbers up to 4."""


class RecordingCaches(Caches):
    """Caches that keep what is stored for prefixes, and store it only if `stores`."""

    def __init__(self, engine: EngineHarness, *, stores: bool) -> None:
        self.stores = stores
        needs_snapshots = caches_of((engine.loaded, engine.preparer)).prefixes.needs_snapshots
        super().__init__(prefix_bytes=64 << 20, needs_snapshots=needs_snapshots)
        self.taken: dict[tuple[int, ...], list[NDArray[np.float32]]] = {}

    def store_prefix(self, prompt: Any, source: Any, salt: str) -> None:
        arrays = source.take(0, len(prompt.token_ids)).arrays
        key = tuple(prompt.token_ids.tolist())
        self.taken[key] = [to_numpy(array.astype(mx.float32)) for array in arrays]
        if self.stores:
            super().store_prefix(prompt, source, salt)


@dataclass(frozen=True)
class Columns:
    """Keys and values of each layer that was stored, after a prompt of `num_prompt` tokens."""

    num_prompt: int
    arrays: list[NDArray[np.float32]]

    def check_equal(self, other: Columns, min_answer: int = 20, *, last: int = 0) -> None:
        """Compare the columns that both have, of the `last` arrays or of all."""
        for own, wanted in zip(self.arrays[-last:], other.arrays[-last:], strict=True):
            count = min(own.shape[2], wanted.shape[2])
            assert count > self.num_prompt + min_answer
            np.testing.assert_allclose(own[:, :, :count], wanted[:, :, :count], atol=_ROUNDING)


def columns_of(
    new_engine: Callable[..., EngineHarness],
    fill: Callable[[EngineHarness], None],
    *,
    stores: bool = False,
) -> Mapping[str, Columns]:
    """The KV of each prompt with its answer, by request; `new_engine` takes `caches`."""
    caches = RecordingCaches(new_engine(), stores=stores)
    engine = new_engine(caches=caches)
    fill(engine)
    engine.run()
    columns = {}
    for name, prompt in engine.prompts.items():
        ids = tuple(prompt.token_ids.tolist())
        if stored := [key for key in caches.taken if key[: len(ids)] == ids]:
            columns[name] = Columns(len(ids), caches.taken[max(stored, key=len)])
    return columns
