"""Models of this machine: their list, and the settings with which they are tried."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.unit.cli.client.test_own_daemons import answering
from vlm_server.cli.main import build_parser, main
from vlm_server.cli.options import settings_arguments

SERVED = {"data": [{"id": "far", "state": "ready", "family": "llama"}, {"id": "strange"}]}


def test_list_shows_embedded_model_and_facts_of_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    with answering(json.dumps(SERVED).encode()) as url:
        assert main(["models", "list", "--url", url]) == 0
    told = capsys.readouterr()
    assert [line.split() for line in told.out.splitlines()[1:]] == [
        ["demo", "15", "MB", "qwen3_vl", "float16", "vlm-server"],
        ["far", "\u2013", "llama", "\u2013", "ready", "the", "daemon"],
        ["strange", *["\u2013"] * 3, "the", "daemon"],
    ]
    assert told.err == ""


def test_embedded_model_needs_no_download(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "demo"]) == 0
    assert "is a part of vlm-server" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["models", "check"], ["pull"]])
def test_models_check_and_pull_pass_settings_on(command: list[str], tmp_path: Path) -> None:
    options = build_parser().parse_args([*command, str(tmp_path), "--set", "server.port=1"])
    assert settings_arguments(options) == ["--model", str(tmp_path), "--set", "server.port=1"]
