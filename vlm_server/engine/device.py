"""`python -m vlm_server.engine.device`: tries the device; see `supervisor.device_probe`."""

from __future__ import annotations

import os
import sys

import msgspec

from vlm_server.platform.footprint import be_killed_first
from vlm_server.supervisor.device_probe import DeviceReport


def main() -> None:
    """Write the report after each step, a line each: the next step may end the process."""
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    be_killed_first()

    def tell(report: DeviceReport) -> None:
        os.write(answer, msgspec.json.encode(report) + b"\n")

    tell(DeviceReport(step="import mlx"))
    from vlm_server.runner.device.device import current_device
    from vlm_server.runner.device.speed import blas_libraries, product_gflops

    device = current_device()
    report = DeviceReport(
        step="multiply two matrices",
        kind=device.kind.value,
        name=device.name,
        memory_bytes=device.memory_bytes,
        suitable_bytes=device.suitable_bytes,
        blas=blas_libraries(),
    )
    tell(report)
    report = msgspec.structs.replace(report, gflops=product_gflops(), step="import mlx-vlm")
    tell(report)
    import vlm_server.runner.loading.load  # noqa: F401  all that loading needs

    tell(msgspec.structs.replace(report, step=""))


if __name__ == "__main__":
    main()
