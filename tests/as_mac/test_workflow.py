"""Hosted runners run commands that there are; `actionlint` finds nothing, where it is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_their_commands_are_there():
    texts = [path.read_text() for path in WORKFLOWS]
    commands = {word for text in texts for word in re.findall(r"\bscripts/\w+", text)}
    assert {"scripts/setup", "scripts/check", "scripts/test"} <= commands
    assert all(os.access(ROOT / command, os.X_OK) for command in commands)


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="needs actionlint")
@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actionlint_finds_nothing(path: Path):
    made = subprocess.run(["actionlint", str(path)], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout
