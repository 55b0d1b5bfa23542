"""What is known of each kind of device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from vlm_server.runner.device.device import Device, DeviceKind, current_device

MACHINE_BYTES = 1 << 12
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
    "metal": (
        {"device_name": "M4", "memory_size": 2000, "max_recommended_working_set_size": 1500},
        DeviceKind.METAL, "M4", 2000, 1500,
    ),
    "metal that recommends nothing": (
        {"device_name": "M4", "memory_size": 2000}, DeviceKind.METAL, "M4", 2000, 1800,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_default_device(monkeypatch: pytest.MonkeyPatch, case: tuple[Any, ...]):
    info, kind, *expected = case
    mlx_type = mx.DeviceType.cpu if kind is DeviceKind.CPU else mx.DeviceType.gpu
    monkeypatch.setattr(mx, "default_device", lambda: SimpleNamespace(type=mlx_type))
    monkeypatch.setattr(mx, "device_info", lambda _: info)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: kind is DeviceKind.CUDA)
    monkeypatch.setattr("vlm_server.machine.memory_bytes", lambda: MACHINE_BYTES)
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
