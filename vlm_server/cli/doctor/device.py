"""Checks of the device that models run on: MLX, its drivers, its BLAS, the memory it may wire."""

from __future__ import annotations

import platform
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement

from vlm_server import __version__
from vlm_server.cli.doctor.findings import Finding, ok, output_of, problem, warning
from vlm_server.cli.doctor.situation import Situation
from vlm_server.platform.private_folder import PrivateFolder
from vlm_server.settings import EngineSettings, MemorySettings
from vlm_server.sizes import memory_size
from vlm_server.supervisor.device_examination import DeviceReport, examine_device
from vlm_server.supervisor.engine_process.start import for_models

EXAMINATION_SECONDS = 60.0
_DISTRIBUTION = "vlm-server"
_INSTALL_AGAIN = "install again: delete .venv and run scripts/setup, or see docs/packages.md"
_SHOWN = ("mlx", "mlx-cpu", "mlx-cuda-13", "mlx-metal", "mlx-vlm")


def look_at_device(situation: Situation) -> list[Finding]:
    """Checks of versions, device, BLAS, and on macOS of the wired limit."""
    wants_openblas = situation.settings.engine.openblas == "auto"
    device_report = try_device(situation.settings.engine)
    system = platform.system()
    findings = [versions(), device(device_report, has_nvidia_gpu=nvidia_driver() is not None)]
    if device_report.kind == "cpu" and system == "Linux":
        findings.append(blas(device_report, wants_openblas=wants_openblas))
    if system == "Darwin":
        limit = output_of(("sysctl", "-n", "iogpu.wired_limit_mb"))
        findings.append(wired_limit(limit, situation.settings.memory, device_report))
    return findings


def try_device(settings: EngineSettings) -> DeviceReport:
    """The report of the device in an engine's environment."""
    private = PrivateFolder()
    try:
        environment = for_models(private, settings)
        return examine_device(environment, EXAMINATION_SECONDS)
    except OSError as error:
        return DeviceReport(step="make a private folder", fault=str(error))
    finally:
        private.close()


def versions() -> Finding:
    """Whether the installed packages are those required by this version."""
    names_and_versions = ", ".join(
        f"{name} {version}" for name in _SHOWN if (version := _version(name))
    )
    text = f"vlm-server {__version__}, {names_and_versions or 'no mlx'}"
    if wrong := wrong_versions():
        return problem("versions", f"{text}; {', '.join(wrong)}", _INSTALL_AGAIN)
    return ok("versions", text)


def wrong_versions(distribution: str = _DISTRIBUTION) -> list[str]:
    """The packages that are missing, or of another version than `distribution` requires."""
    try:
        requirements = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return []  # run from a folder, without installing
    wrong = []
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _version(requirement.name)
        if version is None:
            wrong.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, and {requirement.specifier} is needed")
    return wrong


def device(report: DeviceReport, *, has_nvidia_gpu: bool) -> Finding:
    """Whether MLX finds the best device of this machine."""
    if report.fault:
        return problem("device", f"could not {report.step}: {report.fault}", _advice(report.step))
    size = f"{memory_size(report.memory_bytes)}, of which {memory_size(report.suitable_bytes)} suit"
    text = f"{report.kind} ({report.name}), {size}; {report.gflops:.0f} GFLOP/s in float32"
    if has_nvidia_gpu and report.kind == "cpu":
        advice = "install MLX for it: scripts/setup cuda in a clone, else vlm-server[cuda]"
        return warning("device", f"{text}; an NVIDIA GPU is here and not used", advice)
    if report.kind == "cuda":
        text += f"; driver {nvidia_driver() or 'unknown'}"
    return ok("device", text)


def blas(report: DeviceReport, *, wants_openblas: bool) -> Finding:
    """Whether MLX uses OpenBLAS on a Linux CPU."""
    if not report.gflops:
        return warning("blas", "not tried, as the device does not work", "see `device`")
    preloaded = [file for file in report.blas if "openblas" in file.lower()]
    speed = f"{report.gflops:.0f} GFLOP/s"
    if preloaded:
        return ok("blas", f"OpenBLAS, {preloaded[0]}, {speed}")
    slow = f"MLX's reference BLAS, {speed}: models run many times slower than with OpenBLAS"
    if not wants_openblas:
        return warning("blas", slow, "engine.openblas is off: set it to auto")
    return warning("blas", slow, "pip install cmeel-openblas, or apt install libopenblas0-pthread")


def wired_limit(setting: str | None, memory: MemorySettings, report: DeviceReport) -> Finding:
    """The memory that a Mac's GPU may use; `setting` is `iogpu.wired_limit_mb`, or None."""
    limit_mb = int(setting) if setting and setting.strip().isdecimal() else 0
    allowed_bytes = limit_mb << 20 if limit_mb else report.suitable_bytes
    reason = f"iogpu.wired_limit_mb is {limit_mb}" if limit_mb else "the system's own choice"
    text = f"the GPU may use {memory_size(allowed_bytes)} ({reason})"
    if limit_mb and report.memory_bytes and allowed_bytes > report.memory_bytes * 9 // 10:
        advice = "leave the system a tenth: sudo sysctl iogpu.wired_limit_mb=0 is its own choice"
        return warning("wired limit", text, advice)
    limit_bytes = memory.limit_on(report.memory_bytes)
    if allowed_bytes and limit_bytes > allowed_bytes:
        needed_mb = limit_bytes >> 20
        advice = f"lower memory.max_bytes, or: sudo sysctl iogpu.wired_limit_mb={needed_mb}"
        return warning("wired limit", f"{text}, less than memory.max_bytes", advice)
    return ok("wired limit", text)


def nvidia_driver() -> str | None:
    """The version of NVIDIA's driver; None without a GPU of theirs."""
    words = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    output = (output_of(words) or "").strip()
    return output.splitlines()[0] if output else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _advice(step: str) -> str:
    if step.startswith("import"):
        if platform.system() == "Linux":
            return "install a backend: scripts/setup in a clone, else vlm-server[cpu] or [cuda]"
        return _INSTALL_AGAIN
    if step.startswith("multiply"):
        return "update the driver; on a CPU, set engine.openblas to off and try again"
    return "see that programs can be started here: memory, processes, a temporary folder"
