"""Shell scripts run under any sh: macOS's is an old bash, Debian's is dash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    path
    for folder in ("scripts", "packaging")
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and path.read_bytes().startswith(b"#!/bin/sh\n")
)
CHECKS = (["dash", "-n"], ["shellcheck", "-s", "sh"])


def test_shell_scripts_are_collected() -> None:
    assert ROOT / "scripts/setup" in SCRIPTS
    assert len(SCRIPTS) > 10


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check[0])
def test_shell_scripts_pass_dash_and_shellcheck(check: list[str]) -> None:
    where = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if (program := shutil.which(check[0], path=where)) is None:
        pytest.skip(f"needs {check[0]}")
    for script in SCRIPTS:
        words = [program, *check[1:], str(script)]
        result = subprocess.run(words, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{script}: {result.stdout}{result.stderr}"
