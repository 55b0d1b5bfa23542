"""The memory that a checkpoint's weights need, and a check against the limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vlm_server.errors import ModelLoadError
from vlm_server.hub.layout import read_weight_files
from vlm_server.runner.backends import backend_of
from vlm_server.runner.device.device import Device
from vlm_server.runner.loading.checkpoint.files import check_weights
from vlm_server.sizes import file_size, memory_size

_SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2}
_SIZES |= {"I16": 2, "U16": 2}
"""Bytes of a number by type; one byte for other types."""
_CAST = frozenset({"F64", "F32", "F16", "BF16"})
"""Types that `model.dtype` changes."""
_TARGETS = {"float32": 4, "float16": 2, "bfloat16": 2}
_SURPLUS = 1.25
"""Allowance of `check_fits` for tensors that the model does not use."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory for weights: `limit_bytes`, but no more than the `device` has."""

    limit_bytes: int
    device: Device

    @property
    def bytes(self) -> int:
        return min(self.limit_bytes, self.device.memory_bytes)


def dtype_on(device: Device, name: str) -> str:
    """The type that floating-point weights are cast to; `auto` if they keep theirs."""
    return backend_of(device).default_dtype if name == "auto" else name


def tensors_in(folder: Path) -> Counter[str]:
    """The number of elements, by type, of all tensors in the files that mlx-vlm reads."""
    counts = Counter[str]()
    for path in read_weight_files(folder):
        for kind, count in check_weights(path):
            counts[kind] += count
    return counts


def bytes_as(dtype: str, tensors: Mapping[str, int]) -> int:
    """Bytes of tensors, given by type and number of elements, cast to `dtype`."""
    return sum(
        count * (_TARGETS[dtype] if dtype in _TARGETS and kind in _CAST else _SIZES.get(kind, 1))
        for kind, count in tensors.items()
    )


def check_fits(
    tensors: Mapping[str, int], dtype: str, budget: Budget, loaded_bytes: int | None = None
) -> None:
    """Raises ModelLoadError if weights that are stored as `tensors` do not fit.

    `dtype`: see `dtype_on`. `loaded_bytes`: their size, if known; otherwise the model may not use
    all tensors.
    """
    size_bytes, most = loaded_bytes, budget.bytes
    if size_bytes is None:
        size_bytes, most = bytes_as(dtype, tensors), int(_SURPLUS * budget.bytes)
    if size_bytes > most:
        raise ModelLoadError(_reason(size_bytes, bytes_as("auto", tensors), dtype, budget))


def _reason(size_bytes: int, stored_bytes: int, dtype: str, budget: Budget) -> str:
    """The figures and what to change, in one message."""
    stored_size = (
        f" ({file_size(stored_bytes)} in its files)" if stored_bytes < 0.9 * size_bytes else ""
    )
    cast = "" if dtype == "auto" else f" as {dtype}"
    device = budget.device
    where = "this machine lets a process use" if device.name == "cpu" else f"the {device.name} has"
    advice = ["serve a smaller or a quantized checkpoint"]
    if stored_size and stored_bytes <= budget.bytes:
        advice.append('set model.dtype = "bfloat16", which is slower on a CPU')
    if budget.limit_bytes < device.memory_bytes and size_bytes < device.memory_bytes:
        advice.append("raise memory.max_bytes")
    return (
        f"the weights do not fit: they take {memory_size(size_bytes)}{cast}{stored_size}, and "
        f"{memory_size(budget.bytes)} are allowed (memory.max_bytes; {where} "
        f"{memory_size(device.memory_bytes)}): {', or '.join(advice)}"
    )
