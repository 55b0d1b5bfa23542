"""Attention and kernels of each kind of device, behind one interface."""

from __future__ import annotations

from vlm_server.runner.backends.cpu import CpuBackend
from vlm_server.runner.backends.cuda.attention import CudaBackend
from vlm_server.runner.backends.interface import Backend
from vlm_server.runner.backends.metal import MetalBackend
from vlm_server.runner.device.device import Device, DeviceKind

_BACKENDS: dict[DeviceKind, Backend] = {
    DeviceKind.CPU: CpuBackend(),
    DeviceKind.CUDA: CudaBackend(),
    DeviceKind.METAL: MetalBackend(),
}


def backend_of(device: Device) -> Backend:
    """The backend of a device's kind."""
    return _BACKENDS[device.kind]
