"""Tensor parallelism (Shoeybi et al. 2019): several processes, each with a shard of one model.

A rank has some heads of every attention and some hidden units of every MLP. What it adds to the
hidden states is summed over all ranks, so that all have the same hidden states and logits. mlx-vlm
shards some models itself; families whose layers are plain ones are sharded here with MLX's layers.
Rank 0 alone encodes images.
"""

from __future__ import annotations

import faulthandler
from typing import Any

import mlx.core as mx
from mlx.nn import Linear, Module, QuantizedLinear  # type: ignore[attr-defined]  # is not typed
from mlx.nn.layers.distributed import (
    AllToShardedLinear,
    QuantizedAllToShardedLinear,
    QuantizedShardedToAllLinear,
    ShardedToAllLinear,
    shard_linear,
)

from vlm_server.cache.disk.files import default_folder
from vlm_server.errors import ModelLoadError
from vlm_server.protocol.commands import Rank
from vlm_server.runner.fingerprint import Checkpoint, KeptHashes

_JOIN_SECONDS = 60.0
"""MLX itself waits without end, and holds Python's interpreter lock: the end of another process
would go unnoticed."""
_TO_PARTS = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}
_TO_ALL = {"self_attn": ("o_proj",), "mlp": ("down_proj",)}
_COUNTS = ("n_heads", "n_kv_heads")
_PLAIN: dict[type, type] = {
    AllToShardedLinear: Linear,
    QuantizedAllToShardedLinear: QuantizedLinear,
    ShardedToAllLinear: Linear,
    QuantizedShardedToAllLinear: QuantizedLinear,
}
"""MLX's sharded layers, and the layer that each computes with its part of the weights."""
_SUMMED = (ShardedToAllLinear, QuantizedShardedToAllLinear)
"""Those whose outputs are summed over all ranks."""


class SummedLinear(Module):  # type: ignore[misc]
    """A linear layer whose output is the sum over all ranks, each with some of its inputs."""

    def __init__(self, linear: Any, group: mx.distributed.Group) -> None:
        """`linear`: this rank's part; its bias is added once, to the sum."""
        super().__init__()
        self.linear = linear
        self._group = group
        if "bias" in linear:
            self.bias = linear.pop("bias")

    def __call__(self, x: mx.array) -> mx.array:
        total = mx.distributed.all_sum(self.linear(x), group=self._group)
        return total + self.bias if "bias" in self else total


class Ranks:
    """A rank's view of MLX's group. All calls come from the thread that runs the model."""

    def __init__(self, group: mx.distributed.Group) -> None:
        self._group = group
        self.rank = group.rank()
        self.size = group.size()

    @classmethod
    def join(cls, rank: Rank) -> Ranks:
        """Connect all ranks, whose processes run; `rank` is this one, whose environment is set.

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

    def shard(self, model: Any, family: str, *, is_shardable: bool) -> None:
        """Leave only this rank's shard of `model`, whose weights are lazy.

        Raises ModelLoadError if that is not known to be right, or its heads can't be divided.
        `is_shardable`: see `Family`.
        """
        language_model = model.language_model
        shardable = next((part for part in (model, language_model) if hasattr(part, "shard")), None)
        if shardable is None and not is_shardable:
            raise ModelLoadError(
                f"a model of the family {family} can't be split over several processes "
                "(docs/distributed.md): serve it without distributed.hostfile"
            )
        _check_heads(language_model, self.size)
        try:
            if shardable is not None:
                shardable.shard(self._group)
            else:
                for layer in language_model.layers:
                    _shard_layer(layer, self._group)
        except ValueError as error:  # from MLX: a quantized row can't be cut everywhere
            raise ModelLoadError(
                f"the model's weights can't be split over {self.size} processes: {error}"
            ) from error
        _use_plain_layers(language_model)

    def share(self, tokens: mx.array) -> mx.array:
        """Rank 0's `tokens`, (rows,) int32, on all ranks; lazy.

        Other ranks' tokens are discarded but computed first: all ranks must sum in the same order.
        """
        own_tokens = tokens if self.leads else mx.zeros_like(tokens) * tokens
        return mx.distributed.all_sum(own_tokens, group=self._group)


def fingerprint_of(checkpoint: Checkpoint) -> str:
    """The fingerprint of a loaded model, which is the same on all ranks if their weights are.

    Raises ModelLoadError if files were changed since loading, or can't be read again.
    """
    try:
        return checkpoint.fingerprint(KeptHashes(default_folder() / "hashes.json"))
    except OSError as error:
        raise ModelLoadError(f"{checkpoint.folder}: {error.strerror}") from error


def _check_heads(language_model: Any, size: int) -> None:
    for layer in language_model.layers:
        for name in _COUNTS:
            count = getattr(getattr(layer, "self_attn", None), name, size)
            if count % size:
                kind = "attention" if name == "n_heads" else "key and value"
                raise ModelLoadError(
                    f"the model has {count} {kind} heads, which {size} processes can't share"
                )


def _shard_layer(layer: Any, group: mx.distributed.Group) -> None:
    for kind, names in (("all-to-sharded", _TO_PARTS), ("sharded-to-all", _TO_ALL)):
        for part, projections in names.items():
            module = getattr(layer, part)
            for name in projections:
                setattr(module, name, shard_linear(getattr(module, name), kind, group=group))
    for name in _COUNTS:
        setattr(layer.self_attn, name, getattr(layer.self_attn, name) // group.size())


def _use_plain_layers(language_model: Any) -> None:
    """Replace MLX's sharded layers by plain ones, which backends have kernels for."""
    for module in language_model.modules():
        for name, layer in list(module.items()):
            kind = type(layer)
            if kind not in _PLAIN:
                continue
            group = layer.group
            del layer.group
            layer.__class__ = _PLAIN[kind]
            if kind in _SUMMED:
                module[name] = SummedLinear(layer, group)
