"""Processes that import mlx to answer one question: `python -m vlm_server.examine`.

With the argument `device` the process examines the device (see `supervisor.device_examination`),
with `checkpoint` a checkpoint (see `hub.examination`). Output of libraries goes to standard error.
"""

from __future__ import annotations

import logging
import os
import sys
from io import FileIO

import msgspec

from vlm_server.hub.examination import Examination, ExaminationRequest
from vlm_server.platform import backend
from vlm_server.platform.footprint import be_killed_first
from vlm_server.supervisor.device_examination import DeviceReport


def main() -> None:
    """Answer the question of the argument on standard output."""
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    be_killed_first()
    with os.fdopen(answer, "wb", buffering=0) as out:
        if sys.argv[1] == "device":
            _examine_device(out)
        else:
            logging.basicConfig(level=logging.ERROR)
            request = msgspec.json.decode(sys.stdin.buffer.read(), type=ExaminationRequest)
            out.write(msgspec.json.encode(_examine_checkpoint(request)))


def _examine_device(out: FileIO) -> None:
    """Write the report after each step, a line each: the next step may end the process."""

    def send(report: DeviceReport) -> None:
        out.write(msgspec.json.encode(report) + b"\n")

    send(DeviceReport(step="import mlx"))
    from vlm_server.runner.device.device import blas_libraries, current_device, product_gflops

    device = current_device()
    report = DeviceReport(
        step="multiply two matrices",
        kind=device.kind.value,
        name=device.name,
        memory_bytes=device.memory_bytes,
        suitable_bytes=device.suitable_bytes,
        blas=blas_libraries(),
    )
    send(report)
    report = msgspec.structs.replace(report, gflops=product_gflops(), step="import mlx-vlm")
    send(report)
    import vlm_server.runner.loading.load  # noqa: F401  all that loading needs

    send(msgspec.structs.replace(report, step=""))


def _examine_checkpoint(request: ExaminationRequest) -> Examination:
    try:  # mlx may lack its backend
        from vlm_server.engine.start import MIN_REQUEST_TOKENS
        from vlm_server.runner.loading.facts import examine
    except ImportError as error:
        return Examination(refusal=backend.not_loaded(error))
    return examine(request, MIN_REQUEST_TOKENS)


if __name__ == "__main__":
    main()
