"""What is known of each kind of device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from vlm_server.runner.device.device import Device, DeviceKind, current_device

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
def test_the_default_device(monkeypatch: pytest.MonkeyPatch, case: tuple[Any, ...]):
    info, kind, *expected = case
    mlx_type = mx.DeviceType.cpu if kind is DeviceKind.CPU else mx.DeviceType.gpu
    monkeypatch.setattr(mx, "default_device", lambda: SimpleNamespace(type=mlx_type))
    monkeypatch.setattr(mx, "device_info", lambda _: info)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: kind is DeviceKind.CUDA)
    monkeypatch.setattr("vlm_server.platform.machine.memory_bytes", lambda: MACHINE_BYTES)
    assert current_device() == Device(kind, *expected)


@pytest.mark.parametrize(
    ("kind", "trims_own_pool", "compiles", "padding_tokens"),
    [
        (DeviceKind.CPU, False, False, 1),
        (DeviceKind.CUDA, True, True, 256),
        (DeviceKind.METAL, True, False, 1),
    ],
)
def test_what_follows_from_the_kind(
    kind: DeviceKind, trims_own_pool: bool, compiles: bool, padding_tokens: int
):
    device = Device(kind, "a device", 100, 90)
    assert device.is_cpu == (kind is DeviceKind.CPU)
    assert device.trims_own_pool == trims_own_pool
    assert device.compiles_towers == compiles
    assert device.prefill_padding_tokens == padding_tokens


@pytest.mark.parametrize(("used", "is_short"), [(0, False), (3100, False), (3101, True)])
def test_a_gpu_is_short_of_memory_if_little_is_free(
    monkeypatch: pytest.MonkeyPatch, used: int, is_short: bool
):
    """A driver that says nothing says 0."""
    monkeypatch.setattr(Device, "used_bytes", lambda _: used)
    assert Device(DeviceKind.CUDA, "H200", 3200, 1).is_short_of_memory() == is_short


@pytest.mark.parametrize(("level", "is_short"), [(1, False), (2, True), (4, True)])
def test_a_mac_is_short_of_memory_if_the_system_says_so(
    monkeypatch: pytest.MonkeyPatch, level: int, is_short: bool
):
    monkeypatch.setattr("vlm_server.platform.machine.memory_pressure", lambda: level)
    assert Device(DeviceKind.METAL, "M4", 1, 1).is_short_of_memory() == is_short
    assert not Device(DeviceKind.CPU, "cpu", 1, 1).is_short_of_memory()
