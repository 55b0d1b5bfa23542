"""The examination of the device in a process of its own, as an engine would use it.

The caller needs no mlx, and survives a missing library, an instruction that the processor lacks, or
a driver that hangs.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

import msgspec

from vlm_server.platform.child import launch
from vlm_server.supervisor.engine_process.history import signal_name

_MODULE = "vlm_server.examine"


class DeviceReport(msgspec.Struct, frozen=True):
    """The known facts of the device, and in `fault` why there are no more.

    `step` is what was tried last, empty if everything worked. `gflops` is the speed of float32
    matrix products, `blas` the files of BLAS libraries that were loaded (Linux).
    """

    step: str = ""
    kind: str = ""
    name: str = ""
    memory_bytes: int = 0
    suitable_bytes: int = 0
    blas: list[str] = []
    gflops: float = 0.0
    fault: str = ""


def examine_device(environment: Mapping[str, str], seconds: float) -> DeviceReport:
    """The report of a child with `environment` added to ours. A failure is part of the report."""
    try:
        process = subprocess.run(
            launch.command(_MODULE, "device"),
            env={**launch.model_environment(), **environment},
            cwd=launch.FOLDER,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as error:
        return _failed_report(error.stdout or b"", f"no end within {seconds:.0f} s")
    except OSError as error:
        return DeviceReport(step="start a process", fault=str(error.strerror))
    if process.returncode == 0:
        return _last_report(process.stdout)
    return _failed_report(process.stdout, _reason(process.returncode, process.stderr))


def _failed_report(output: bytes, fault: str) -> DeviceReport:
    return msgspec.structs.replace(_last_report(output), fault=fault)


def _last_report(output: bytes) -> DeviceReport:
    lines = output.splitlines()
    try:
        return msgspec.json.decode(lines[-1], type=DeviceReport)
    except (IndexError, msgspec.DecodeError):
        return DeviceReport(step="start Python")


def _reason(status: int, errors: bytes) -> str:
    """The last line of a traceback, or the signal that ended the process."""
    if status < 0:
        return f"ended by {signal_name(-status)}"
    lines = errors.decode(errors="replace").strip().splitlines()
    return " ".join(lines[-1].split())[:300] if lines else f"exit code {status}"
