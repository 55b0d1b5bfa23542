"""Settings and models that can't be used, and what is said of them."""

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


def seen(path: Path | None = None, *overrides: str) -> Situation:
    return situation.examine(argparse.Namespace(config=path, set=list(overrides)))


def test_all_unknown_names_are_listed_with_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text("[server]\nprot = 1\nport = 8000\nzzz = 1\n[modle]\npath = 'x'\n")
    found = settings.settings(seen(path))
    assert found.level == "problem"
    assert found.text == (
        "there is no setting server.prot (did you mean port?); there is no setting server.zzz; "
        "there is no section [modle] (did you mean model?)"
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
def test_other_faults_are_those_of_the_settings(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "my.toml"
    path.write_text(text)
    found = settings.settings(seen(path))
    assert found.level == "problem"
    assert words in found.text
    assert settings.model(seen(path)).level == "warning"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert settings.settings(seen(tmp_path / "none.toml")).level == "problem"


def test_good_settings_say_where_they_are_from(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text("[server]\nport = 8001\n")
    assert settings.settings(seen(path)).text == f"valid; 1 set, from {path}"
    assert settings.settings(seen()).text == "valid; all are defaults"


def test_a_model_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf/model.gguf").touch()
    found = settings.model(seen(None, f"model.path={tmp_path / 'gguf'}"))
    assert found.level == "problem"
    assert "GGUF" in found.text
    assert settings.model(seen(None, f"model.path={tmp_path / 'none'}")).level == "problem"
    assert "can't read" in settings.model(seen(None, f"model.path={tmp_path / ('x' * 300)}")).text


def test_a_model_that_is_not_here_yet() -> None:
    found = settings.model(seen(None, "model.path=nobody/nothing"))
    assert found.level == "warning"
    assert "vlm-server pull nobody/nothing" in found.advice
