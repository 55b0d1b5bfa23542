"""Facts of the current device, per kind of device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from vlm_server.runner.device.device import Device, DeviceKind, current_device
from vlm_server.runner.memory import limit_bytes
from vlm_server.settings import MemorySettings

MACHINE_BYTES = 1 << 12
GIB = 1 << 30
CASES = {
    "cpu": ({}, DeviceKind.CPU, "cpu", MACHINE_BYTES, MACHINE_BYTES // 2),
    "cuda": (
        {"device_name": "H200", "total_memory": 1000, "free_memory": 400},
        DeviceKind.CUDA, "H200", 1000, 900,
    ),
    "cuda that runs our kernels": (
        {"device_name": "H200", "total_memory": 1000, "compute_capability_major": 9},
        DeviceKind.CUDA, "H200", 1000, 900, True,
    ),
    "cuda that is too old for them": (
        {"device_name": "T4", "total_memory": 1000, "compute_capability_major": 7},
        DeviceKind.CUDA, "T4", 1000, 900,
    ),
    "a Mac of 8 GB": (
        {"device_name": "M1", "memory_size": 8 * GIB, "max_recommended_working_set_size": 5 * GIB},
        DeviceKind.METAL, "M1", 8 * GIB, 4 * GIB,
    ),
    "a Mac of 64 GB": (
        {"device_name": "M4", "memory_size": 64 * GIB, "max_recommended_working_set_size": 3 << 34},
        DeviceKind.METAL, "M4", 64 * GIB, 48 * GIB * 85 // 100,
    ),
    "metal that recommends nothing": (
        {"device_name": "M4", "memory_size": 64 * GIB}, DeviceKind.METAL, "M4", 64 * GIB,
        64 * GIB * 85 // 100,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_current_device_reads_mlxs_device_info(
    monkeypatch: pytest.MonkeyPatch, case: tuple[Any, ...]
):
    info, kind, *expected = case
    mlx_type = mx.DeviceType.cpu if kind is DeviceKind.CPU else mx.DeviceType.gpu
    monkeypatch.setattr(mx, "default_device", lambda: SimpleNamespace(type=mlx_type))
    monkeypatch.setattr(mx, "device_info", lambda _: info)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: kind is DeviceKind.CUDA)
    monkeypatch.setattr("vlm_server.platform.machine.memory_bytes", lambda: MACHINE_BYTES)
    assert current_device() == Device(kind, *expected)


@pytest.mark.parametrize(("wanted_bytes", "limit"), [(None, 5), (7, 7), (11, 10)])
def test_limit_is_at_most_memory_of_device(
    wanted_bytes: int | None, limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device(DeviceKind.CPU, "cpu", memory_bytes=10 * GIB, suitable_bytes=5 * GIB)
    wanted_bytes = wanted_bytes and wanted_bytes * GIB
    assert limit_bytes(MemorySettings(max_bytes=wanted_bytes), device) == limit * GIB
    assert ("11.0 GiB; the limit is all that the device has, 10.0 GiB" in caplog.text) == (
        limit == 10
    )
