"""Makes the engine take MLX's default device for a Mac's GPU; with this folder on PYTHONPATH.

MLX's device stays what it is: a CPU, or a CUDA GPU without our kernels. What $AS_MAC_FAULT, a file,
says happens once: `decode out_of_memory` lets a decode step fail as Metal lets it fail, after it
was launched, to be met by whoever comes next. The points are `decode`, `prefill`, `encode` and
`store`, the errors `out_of_memory`, `step_too_long` and `abort`, which ends the process.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

_LAPACKS = "lu factorization failed"
"""Words of the error that operations of LAPACK raise late: it is taken for one of Metal's."""
_LISTS = {"out_of_memory": "_ALLOCATIONS", "step_too_long": "_TIME_OUTS"}


def _failing(array: Any) -> Any:
    """`array` plus a zero that is never computed."""
    import mlx.core as mx

    return array + (0 * mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)[0, 0]).astype(array.dtype)


def _at(point: str, call: Callable[..., Any], spoil: Callable[[Any], Any]) -> Callable[..., Any]:
    """`call`, whose result is spoiled when the file says so."""

    def called(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        if (kind := _wanted(point)) is None:
            return result
        if kind == "abort":
            os.abort()
        from vlm_server.runner.device import arrays

        for name in _LISTS.values():
            setattr(arrays, name, tuple(each for each in getattr(arrays, name) if each != _LAPACKS))
        setattr(arrays, _LISTS[kind], (*getattr(arrays, _LISTS[kind]), _LAPACKS))
        arrays._LATE = _LAPACKS
        return spoil(result)

    return called


def _wanted(point: str) -> str | None:
    """The failure to happen at `point`, once."""
    file = Path(os.environ.get("AS_MAC_FAULT", "/nowhere"))
    try:
        wanted, kind = file.read_text().split()
    except (OSError, ValueError):
        return None
    if wanted != point:
        return None
    file.unlink()
    return kind


def _take_for_metal(module: ModuleType) -> None:
    module.current_device = lambda: module.Device(  # type: ignore[attr-defined]
        module.DeviceKind.METAL,
        "Apple M1 (stand-in)",
        16 << 30,
        module._suitable_bytes(16 << 30, 32 << 28),
    )


def _spoil_decode(module: Any) -> None:
    """A step's, and not the first token of a prompt, which is part of its prefill."""
    batch, first = module.DecodeBatch, module.sample_next
    later = _at("decode", first, lambda made: (_failing(made[0]), made[1]))
    sample = batch.sample

    def sample_step(self: Any) -> None:
        module.sample_next = later
        try:
            sample(self)
        finally:
            module.sample_next = first

    batch.sample = sample_step


def _spoil_prefill(module: Any) -> None:
    module.Prefill._forward_eager = _at(
        "prefill",
        module.Prefill._forward_eager,
        lambda output: output._replace(logits=_failing(output.logits)),
    )


def _spoil_encode(module: Any) -> None:
    encoding = module.ImageEncoding
    encoding._next_part = _at(
        "encode", encoding._next_part, lambda made: [*made[:-1], _failing(made[-1])]
    )


def _spoil_store(module: Any) -> None:
    module.quantize_in_blocks = _at(
        "store", module.quantize_in_blocks, lambda made: (_failing(made[0]), *made[1:])
    )


_AFTER = {
    "vlm_server.runner.device.device": _take_for_metal,
    "vlm_server.runner.decode.decode_batch": _spoil_decode,
    "vlm_server.runner.prefill.prefill": _spoil_prefill,
    "vlm_server.runner.encode.encoder": _spoil_encode,
    "vlm_server.runner.kv.segments": _spoil_store,
}
"""Changes to modules, made after their import and before their first use."""


class _Finder(importlib.abc.MetaPathFinder):
    is_busy = False

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _AFTER or self.is_busy:
            return None
        self.is_busy = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.is_busy = False
        assert spec is not None
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _AFTER[fullname](module)

        loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
