"""Errors in folders that macOS guards (EPERM) name the guard and its remedy."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vlm_server.cli import options
from vlm_server.cli.doctor.settings import guarded
from vlm_server.cli.doctor.situation import Situation
from vlm_server.cli.service.launchd import Launchd
from vlm_server.errors import ConfigError
from vlm_server.settings import ModelSettings, Settings, load

_guarded: list[Path] = []


def _guard(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook can't be removed, so it guards folders only during these tests."""
    if event in ("open", "os.listdir", "os.scandir") and _guarded:
        path = arguments[0]
        if isinstance(path, str | Path) and any(
            Path(path).is_relative_to(folder) for folder in _guarded
        ):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))


@pytest.fixture(scope="module", autouse=True)
def audit_hook() -> None:
    sys.addaudithook(_guard)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "darwin")
    for name in ("Documents/model", "Models/model"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    (tmp_path / "Documents/my.toml").touch()
    yield tmp_path
    _guarded.clear()


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        options.check_model(path, "model.path")
    return str(caught.value)


def test_model_in_guarded_folder_error_names_full_disk_access(home: Path):
    options.check_model(home / "Documents/model", "model.path")
    _guarded.append(home / "Documents")
    message = refusal(home / "Documents/model")
    assert f"macOS guards {home}/Documents" in message
    assert "Full Disk Access" in message
    assert str(Path(sys.executable).resolve()) in message


def test_permission_errors_elsewhere_do_not_mention_macos_guard(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    _guarded.append(home / "Models")
    assert "macOS" not in refusal(home / "Models/model"), "another folder"
    _guarded.append(home / "Documents")
    monkeypatch.setattr(sys, "platform", "linux")
    assert "macOS" not in refusal(home / "Documents/model"), "another system"


def test_settings_in_guarded_folder_error_names_macos_guard(home: Path):
    _guarded.append(home / "Documents")
    with pytest.raises(ConfigError, match="macOS guards"):
        load(home / "Documents/my.toml")


def test_doctor_warns_of_guarded_folders_of_service(home: Path):
    service = Launchd(home)
    settings = Settings(
        model=ModelSettings(
            path=str(home / "Models/model"), search_folders=("/Volumes/SSD", "/opt/models")
        )
    )
    examined = Situation(
        argparse.Namespace(config=home / "Documents/my.toml"), "", home, service, settings
    )
    assert guarded(examined) == [], "nothing is installed: the terminal's leave is enough"
    service.path.parent.mkdir(parents=True)
    service.path.touch()
    found = guarded(examined)
    assert [finding.level for finding in found] == ["warning"] * 2
    assert f"{home}/Documents" in found[0].text
    assert "/Volumes/SSD" in found[1].advice
