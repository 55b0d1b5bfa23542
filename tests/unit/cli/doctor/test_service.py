"""The doctor judges the installed service by its file, with real programs behind it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from vlm_server import __version__
from vlm_server.cli.doctor import daemon
from vlm_server.cli.service.manager import ServiceCommand
from vlm_server.cli.service.systemd import SystemdUser


def manager(home: Path, *, runs: bool = True) -> SystemdUser:
    def run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, 0 if runs else 3, "", "")

    return SystemdUser(home, run)


def installed(home: Path, program: Path, *, runs: bool = True) -> SystemdUser:
    found = manager(home, runs=runs)
    command = ServiceCommand(program, ["serve"], "127.0.0.1", 8000, 20.0)
    for path, content in found.render(command).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return found


def program(folder: Path, version: str) -> Path:
    path = folder / "vlm-server"
    path.write_text(f"#!/bin/sh\necho vlm-server {version}\n")
    path.chmod(0o755)
    return path


def test_doctor_accepts_absent_service(tmp_path: Path) -> None:
    assert daemon.service(manager(tmp_path)).level == "ok"


def test_doctor_accepts_service_of_this_version(tmp_path: Path) -> None:
    found = daemon.service(installed(tmp_path, program(tmp_path, __version__)))
    assert found.level == "ok"


def test_doctor_reports_stopped_service(tmp_path: Path) -> None:
    found = daemon.service(installed(tmp_path, program(tmp_path, __version__), runs=False))
    assert found.level == "problem"


def test_doctor_warns_of_service_of_another_version(tmp_path: Path) -> None:
    found = daemon.service(installed(tmp_path, program(tmp_path, "0.0.1")))
    assert found.level == "warning"
    assert "version 0.0.1" in found.text


def test_doctor_reports_service_with_missing_program(tmp_path: Path) -> None:
    found = daemon.service(installed(tmp_path, tmp_path / "gone"))
    assert found.level == "problem"
    assert "service install" in found.advice


@pytest.mark.parametrize("text", ["", "[Service]\nExecStart=\n"])
def test_doctor_reports_service_file_without_command(tmp_path: Path, text: str) -> None:
    found = manager(tmp_path)
    found.path.parent.mkdir(parents=True)
    found.path.write_text(text)
    assert daemon.service(found).level == "problem"
