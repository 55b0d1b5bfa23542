"""The doctor finds secrets that others can read, and files that can't be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vlm_server.cli.doctor import settings
from vlm_server.settings import Server

KEYS = '[laptop]\nkey = "a-long-enough-key"\n'


def test_doctor_warns_of_readable_settings_file_with_keys(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text("")
    path.chmod(0o644)
    assert settings.settings_file(path, has_keys=False).level == "ok"
    found = settings.settings_file(path, has_keys=True)
    assert (found.level, found.advice) == ("warning", f"chmod 600 {path}")
    path.chmod(0o600)
    assert settings.settings_file(path, has_keys=True).level == "ok"


def test_doctor_reports_unreadable_settings_file(tmp_path: Path) -> None:
    assert settings.settings_file(tmp_path / "none", has_keys=False).level == "problem"
    assert settings.settings_file(tmp_path, has_keys=False).level == "problem"


@pytest.mark.parametrize(("mode", "level"), [(0o600, "ok"), (0o640, "problem"), (0o604, "problem")])
def test_doctor_reports_key_file_readable_by_others(tmp_path: Path, mode: int, level: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    path.chmod(mode)
    found = settings.key_file(Server(api_key_file=str(path)))
    assert found.level == level
    assert "a-long-enough-key" not in found.text + found.advice


def test_doctor_advises_chmod_of_readable_hub_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("hf_secret")
    path.chmod(0o644)
    assert settings.secret_file("hub token", path).advice == f"chmod 600 {path}"
    path.chmod(0o600)
    assert settings.secret_file("hub token", path).level == "ok"


@pytest.mark.parametrize("mode", [0o777, 0o755])
def test_doctor_warns_of_state_folder_open_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("vlm_server.platform.private_folder.sys.platform", "linux")
    folder = tmp_path / "vlm-server-private"
    folder.mkdir()
    os.chmod(folder, mode)
    assert settings.state_folder().level == "warning"
    os.chmod(folder, 0o700)
    assert settings.state_folder().level == "ok"
