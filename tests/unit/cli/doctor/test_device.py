"""The doctor finds faults of the device, BLAS and packages, in child processes with real faults."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vlm_server.cli.doctor import device
from vlm_server.settings import MemorySettings
from vlm_server.supervisor.device_examination import DeviceReport, examine_device

CPU = DeviceReport(kind="cpu", name="cpu", memory_bytes=8 << 30, suitable_bytes=4 << 30, gflops=5)
METAL = DeviceReport(kind="metal", name="M", memory_bytes=64 << 30, suitable_bytes=48 << 30)


def test_doctor_reports_mlx_import_error(tmp_path: Path) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx/__init__.py").write_text("")
    (tmp_path / "mlx/core.py").write_text("raise ImportError('libmlx.so: cannot open')")
    folders = f"{tmp_path}:{Path(__file__).parents[4]}"
    found = examine_device({"PYTHONPATH": folders}, 60.0)
    assert found.step == "import mlx"
    assert found.fault == "ImportError: libmlx.so: cannot open"
    finding = device.device(found, has_nvidia_gpu=False)
    assert finding.level == "problem"
    assert "scripts/setup" in finding.advice


def test_doctor_reports_signal_that_killed_device_examination(tmp_path: Path) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx/__init__.py").write_text("")
    (tmp_path / "mlx/core.py").write_text("import os\nos.kill(os.getpid(), 4)")
    found = examine_device({"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[4]}"}, 60.0)
    assert found.fault == "ended by SIGILL"


def test_doctor_reports_device_examination_that_hangs(tmp_path: Path) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx/__init__.py").write_text("import time\ntime.sleep(60)")
    found = examine_device({"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[4]}"}, 3.0)
    assert found.fault == "no end within 3 s"


def test_doctor_warns_of_unused_nvidia_gpu() -> None:
    assert device.device(CPU, has_nvidia_gpu=False).level == "ok"
    found = device.device(CPU, has_nvidia_gpu=True)
    assert found.level == "warning"
    assert "cuda" in found.advice


def test_doctor_advises_on_slow_blas() -> None:
    good = DeviceReport(kind="cpu", blas=["/x/libopenblas.so.0"], gflops=100.0)
    slow = DeviceReport(kind="cpu", blas=["/x/libblas.so.3"], gflops=5.0)
    assert device.blas(good, wants_openblas=True).level == "ok"
    assert "cmeel-openblas" in device.blas(slow, wants_openblas=True).advice
    assert "engine.openblas" in device.blas(slow, wants_openblas=False).advice


@pytest.mark.parametrize(
    ("sysctl_output", "limit_bytes", "level"),
    [
        ("0\n", 0, "ok"),
        (None, 0, "ok"),
        ("0\n", 56 << 30, "warning"),
        (f"{56 << 10}\n", 56 << 30, "ok"),
        (f"{63 << 10}\n", 0, "warning"),
    ],
)
def test_doctor_warns_of_wired_limit_mismatch(
    sysctl_output: str | None, limit_bytes: int, level: str
) -> None:
    found = device.wired_limit(sysctl_output, MemorySettings(max_bytes=limit_bytes), METAL)
    assert found.level == level
    assert level == "ok" or "iogpu.wired_limit_mb=" in found.advice


def test_doctor_names_packages_of_wrong_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "strict-1.0.dist-info"
    info.mkdir()
    needed = ("httpx<0.1", "not-there>=1", "msgspec>=0.1", "other; extra == 'x'")
    lines = "".join(f"Requires-Dist: {requirement}\n" for requirement in needed)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: strict\nVersion: 1.0\n{lines}")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    httpx, missing = device.wrong_versions("strict")
    assert httpx.startswith("httpx is 0.")
    assert missing == "not-there is missing"
    assert device.wrong_versions("nothing-of-this-name") == []
