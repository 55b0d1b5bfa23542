"""The doctor reports settings and models that can't be used, with advice."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from vlm_server.cli.doctor import settings, situation
from vlm_server.cli.doctor.situation import Situation


@pytest.fixture(autouse=True)
def no_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)


def situation_of(path: Path | None = None, *overrides: str) -> Situation:
    return situation.examine(argparse.Namespace(config=path, set=list(overrides)))


def test_doctor_lists_unknown_settings_with_nearest_names(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text("[server]\nprot = 1\nport = 8000\nzzz = 1\n[modle]\npath = 'x'\n")
    found = settings.settings(situation_of(path))
    assert found.level == "problem"
    assert found.text == (
        f"{path}, line 2: there is no setting `server.prot`: did you mean `server.port`?; "
        f"{path}, line 4: there is no setting `server.zzz`; "
        f"{path}, line 5: there is no section `modle`: did you mean `model`?"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server\nport = 1", "not valid TOML"),
        ("[server]\nport = 'x'", "server.port"),
        ("[server]\nport = 99999", "server.port"),
        ("[server]\nhost = '0.0.0.0'", "server.api_key_file"),
    ],
)
def test_doctor_reports_invalid_settings(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "my.toml"
    path.write_text(text)
    found = settings.settings(situation_of(path))
    assert found.level == "problem"
    assert words in found.text
    assert settings.model(situation_of(path)).level == "warning"


def test_doctor_reports_missing_settings_file(tmp_path: Path) -> None:
    assert settings.settings(situation_of(tmp_path / "none.toml")).level == "problem"


def test_doctor_names_source_of_valid_settings(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text("[server]\nport = 8001\n")
    assert settings.settings(situation_of(path)).text == f"valid; 1 set, from {path}"
    assert settings.settings(situation_of()).text == "valid; all are defaults"


def test_doctor_reports_path_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf/model.gguf").touch()
    found = settings.model(situation_of(None, f"model.path={tmp_path / 'gguf'}"))
    assert found.level == "problem"
    assert "GGUF" in found.text
    assert settings.model(situation_of(None, f"model.path={tmp_path / 'none'}")).level == "problem"
    assert (
        "can't read"
        in settings.model(situation_of(None, f"model.path={tmp_path / ('x' * 300)}")).text
    )


def test_doctor_advises_pull_of_absent_hub_model() -> None:
    found = settings.model(situation_of(None, "model.path=nobody/nothing"))
    assert found.level == "warning"
    assert "vlm-server pull nobody/nothing" in found.advice
