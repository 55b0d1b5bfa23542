"""The processes that compute one model together, of which each has a part of every layer.

A layer's result is a sum over all ranks, so that all of them have the same hidden states and
scores. Pictures are encoded by rank 0 alone.
"""

from __future__ import annotations

import faulthandler
from typing import Any

import mlx.core as mx

from vlm_server.cache.disk.files import default_folder
from vlm_server.errors import ModelLoadError
from vlm_server.protocol.commands import Rank
from vlm_server.runner.fingerprint import Checkpoint, KeptHashes
from vlm_server.runner.sharding import shard

_JOIN_SECONDS = 60.0
"""MLX waits without end, and lets no other thread of Python run: one of the processes may have died
meanwhile, and the service with it, and nothing here would notice."""


class Ranks:
    """What a rank needs of MLX's group. All calls come from the thread that runs the model."""

    def __init__(self, group: mx.distributed.Group) -> None:
        self._group = group
        self.rank = group.rank()
        self.size = group.size()

    @classmethod
    def join(cls, rank: Rank) -> Ranks:
        """Connect all of them, which are there; `rank` is this one, whose environment is set.

        Raises ModelLoadError if they can't be reached.
        """
        with rank.with_files():
            faulthandler.dump_traceback_later(_JOIN_SECONDS, exit=True)
            try:
                return cls(mx.distributed.init(strict=True, backend=rank.backend))
            except RuntimeError as error:
                raise ModelLoadError(f"the ranks of the model can't be reached: {error}") from error
            finally:
                faulthandler.cancel_dump_traceback_later()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def shard(self, model: Any, family: str) -> None:
        """Leave this rank's part of `model` here. Raises ModelLoadError, see `sharding`."""
        shard(model, family, self._group)

    def share(self, tokens: mx.array) -> mx.array:
        """Rank 0's `tokens`, (rows,) int32, for all ranks; lazy, in the order of the layers' sums.

        What the others drew is not looked at, but waited for: sums must meet in the same order.
        """
        mine = tokens if self.leads else mx.zeros_like(tokens) * tokens
        return mx.distributed.all_sum(mine, group=self._group)


def fingerprint_of(checkpoint: Checkpoint) -> str:
    """That of a model that was loaded, by which ranks know that they have the same weights.

    Raises ModelLoadError if files were changed meanwhile, or can't be read again.
    """
    try:
        return checkpoint.fingerprint(KeptHashes(default_folder() / "hashes.json"))
    except OSError as error:
        raise ModelLoadError(f"{checkpoint.folder}: {error.strerror}") from error
