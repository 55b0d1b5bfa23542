"""`models check` and `pull` pass settings on to a daemon, though they lack options of `serve`."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlm_server.cli.main import build_parser
from vlm_server.cli.options import settings_arguments


@pytest.mark.parametrize("command", [["models", "check"], ["pull"]])
def test_models_check_and_pull_pass_settings_on(command: list[str], tmp_path: Path) -> None:
    options = build_parser().parse_args([*command, str(tmp_path), "--set", "server.port=1"])
    assert settings_arguments(options) == ["--model", str(tmp_path), "--set", "server.port=1"]
