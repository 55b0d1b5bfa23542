"""Bytes of weights are known from their files' headers, and models that can't fit are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlm_server.errors import ModelLoadError
from vlm_server.runner.device.device import Device, DeviceKind
from vlm_server.runner.loading.checkpoint.weights import (
    Budget,
    bytes_as,
    check_fits,
    dtype_on,
    tensors_in,
)

GIB = 1 << 30
CPU = Device(DeviceKind.CPU, "cpu", 6 * GIB, 3 * GIB)
GPU = Device(DeviceKind.CUDA, "H200", 100 * GIB, 90 * GIB)


def sparse(path: Path, **tensors: tuple[str, list[int], int]) -> None:
    """A file of tensors, by name (type, shape, bytes), that takes no space on the disk."""
    header, end = {}, 0
    for name, (kind, shape, size_bytes) in tensors.items():
        header[name] = {
            "dtype": kind,
            "shape": shape,
            "data_offsets": [end, end + size_bytes],
        }
        end += size_bytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def test_weight_bytes_are_counted_in_loaded_dtype(tmp_path: Path) -> None:
    """Quantized weights stay as they are; those in floating point are cast."""
    kinds = {"a": ("BF16", [10, 3], 60), "b": ("F32", [5], 20), "c": ("U32", [7], 28)}
    sparse(tmp_path / "model.safetensors", **kinds, d=("F8_E4M3", [9], 9), e=("F16", [], 2))
    assert bytes_as("auto", tensors_in(tmp_path)) == 60 + 20 + 28 + 9 + 2
    assert bytes_as("float32", tensors_in(tmp_path)) == 120 + 20 + 28 + 9 + 4
    assert bytes_as("bfloat16", tensors_in(tmp_path)) == 60 + 10 + 28 + 9 + 2


def test_weight_bytes_count_only_loaded_files(tmp_path: Path) -> None:
    sparse(tmp_path / "model-1.safetensors", a=("I8", [100], 100))
    sparse(tmp_path / "model-2.safetensors", a=("I8", [10], 10))
    sparse(tmp_path / "consolidated.safetensors", a=("I8", [1], 1))
    assert bytes_as("auto", tensors_in(tmp_path)) == 110
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-2.safetensors", "b": "absent"}}))
    assert bytes_as("auto", tensors_in(tmp_path)) == 10


def test_cpu_defaults_to_float32() -> None:
    assert dtype_on(CPU, "auto") == "float32"
    assert dtype_on(GPU, "auto") == "auto"
    assert dtype_on(CPU, "bfloat16") == "bfloat16"


def test_oversized_weights_are_refused_with_figures(tmp_path: Path) -> None:
    sparse(tmp_path / "model.safetensors", a=("BF16", [131 * GIB // 2], 131 * GIB))
    with pytest.raises(ModelLoadError) as refused:
        check_fits(tensors_in(tmp_path), "float32", Budget(3 * GIB, CPU))
    message = str(refused.value)
    for figure in ("262 GiB as float32", "141 GB in its files", "3.00 GiB", "6.00 GiB"):
        assert figure in message
    assert "quantized checkpoint" in message
    assert "raise" not in message, "there is not so much"


def test_memory_limit_refusal_advises_limit_and_dtype(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as refused:
        check_fits({"BF16": 5 * GIB // 4}, "float32", Budget(3 * GIB, CPU), 5 * GIB)
    assert "raise memory.max_bytes" in str(refused.value)
    assert 'model.dtype = "bfloat16"' in str(refused.value)
    check_fits({"I8": 3 * GIB}, "auto", Budget(3 * GIB, CPU), 3 * GIB)


def test_memory_limit_above_device_is_capped_by_it() -> None:
    with pytest.raises(ModelLoadError, match="the H200 has"):
        check_fits({"I8": 101 * GIB}, "auto", Budget(1 << 50, GPU), 101 * GIB)


def test_possibly_unused_tensors_do_not_refuse_model(tmp_path: Path) -> None:
    """The size that is loaded is known a little later."""
    sparse(tmp_path / "model.safetensors", a=("I8", [11 * GIB // 10], 11 * GIB // 10))
    check_fits(tensors_in(tmp_path), "auto", Budget(GIB, CPU))
