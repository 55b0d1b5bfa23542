"""MLX's errors become request errors according to their words."""

from __future__ import annotations

import pytest

from vlm_server.errors import InternalError, InvalidRequest, OutOfMemory, RequestError, StepTooLong
from vlm_server.runner.device.arrays import DeviceErrors

METAL = "[METAL] Command buffer execution failed: "


@pytest.mark.parametrize(
    ("message", "kind", "is_late"),
    [
        ("[malloc] Unable to allocate 123456789 bytes.", OutOfMemory, False),
        ("[metal::malloc] Attempting to allocate 9 bytes, the maximum is 8", OutOfMemory, False),
        ("cudaMallocAsync(&ptr) failed: out of memory", OutOfMemory, False),
        (
            METAL + "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
            OutOfMemory,
            True,
        ),
        (
            METAL + "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)",
            StepTooLong,
            True,
        ),
        (
            METAL + "Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang)",
            StepTooLong,
            True,
        ),
        (
            METAL + "Impacting Interactivity "
            "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)",
            StepTooLong,
            True,
        ),
        (
            METAL + "Discarded (victim of GPU error/recovery) "
            "(00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)",
            StepTooLong,
            True,
        ),
        (
            METAL + "Ignored (for causing prior/excessive GPU errors) "
            "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)",
            InternalError,
            True,
        ),
        ("[matmul] Last dimension of first input must match", InternalError, False),
    ],
)
def test_device_error_text_determines_kind_and_lateness(
    message: str, kind: type[RequestError], is_late: bool
):
    device_errors = DeviceErrors(are_late=True)
    made = device_errors.request_error(RuntimeError(message), "It failed.")
    assert type(made) is kind
    assert device_errors.num_late == is_late
    assert (device_errors.last_late is made) == is_late
    assert "kIOGPU" not in made.message


def test_python_memory_error_is_out_of_memory():
    device_errors = DeviceErrors(are_late=False)
    assert type(device_errors.request_error(MemoryError(), "")) is OutOfMemory


def test_request_error_passes_through_unchanged():
    error = InvalidRequest("a wrong picture")
    assert DeviceErrors(are_late=False).request_error(error, "") is error
