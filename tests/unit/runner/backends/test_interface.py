"""Properties of a backend that follow from the device's kind."""

from __future__ import annotations

import mlx.core as mx
import pytest

from vlm_server.runner.backends import backend_of
from vlm_server.runner.backends.cpu import CpuBackend
from vlm_server.runner.backends.cuda.attention import CudaBackend
from vlm_server.runner.backends.interface import Backend
from vlm_server.runner.backends.metal import MetalBackend
from vlm_server.runner.device.device import Device, DeviceKind

GIB = 1 << 30


def backend_on(kind: DeviceKind) -> Backend:
    return backend_of(Device(kind, "a device", 100, 90))


@pytest.mark.parametrize(
    ("kind", "trims_own_pool", "compiles_towers", "padding_tokens", "pool_bytes"),
    [
        (DeviceKind.CPU, False, False, 1, GIB // 4),
        (DeviceKind.CUDA, True, True, 256, 2 * GIB),
        (DeviceKind.METAL, True, False, 1, 2 * GIB),
    ],
)
def test_backend_properties_follow_from_device_kind(
    kind: DeviceKind,
    trims_own_pool: bool,
    compiles_towers: bool,
    padding_tokens: int,
    pool_bytes: int,
):
    backend, is_gpu = backend_on(kind), kind is not DeviceKind.CPU
    assert (backend.compiles_kernels, backend.encodes_in_turns) == (is_gpu, is_gpu)
    assert backend.default_dtype == ("auto" if is_gpu else "float32")
    assert backend.trims_own_pool == trims_own_pool
    assert backend.compiles_towers == compiles_towers
    assert backend.prefill_padding_tokens == padding_tokens
    assert backend.pool_bytes(16 * GIB) == pool_bytes


@pytest.mark.parametrize("kind", DeviceKind)
def test_metal_is_only_backend_with_late_errors(kind: DeviceKind):
    assert backend_on(kind).errors_are_late == (kind is DeviceKind.METAL)


@pytest.mark.parametrize(
    ("kind", "info", "used"),
    [
        (DeviceKind.CUDA, {"total_memory": 100, "free_memory": 30}, 70),
        (DeviceKind.CUDA, {"total_memory": 100}, 0),
        (DeviceKind.METAL, {"memory_size": 100}, 0),
        (DeviceKind.CPU, {}, 0),
    ],
)
def test_used_bytes_are_counted_by_cuda_driver_alone(
    monkeypatch: pytest.MonkeyPatch, kind: DeviceKind, info: dict[str, int], used: int
):
    """Memory that is the machine's own is counted by the system alone."""
    monkeypatch.setattr(mx, "device_info", lambda _: info)
    assert backend_on(kind).used_bytes() == used


@pytest.mark.parametrize(("used", "is_short"), [(0, False), (3100, False), (3101, True)])
def test_gpu_is_short_of_memory_if_little_is_free(
    monkeypatch: pytest.MonkeyPatch, used: int, is_short: bool
):
    """A driver that says nothing says 0."""
    monkeypatch.setattr(CudaBackend, "used_bytes", lambda _: used)
    assert CudaBackend().is_short_of_memory(3200) == is_short


@pytest.mark.parametrize(("level", "is_short"), [(1, False), (2, True), (4, True)])
def test_mac_is_short_of_memory_if_system_says_so(
    monkeypatch: pytest.MonkeyPatch, level: int, is_short: bool
):
    monkeypatch.setattr("vlm_server.platform.machine.memory_pressure", lambda: level)
    assert MetalBackend().is_short_of_memory(1) == is_short
    assert not CpuBackend().is_short_of_memory(1)
