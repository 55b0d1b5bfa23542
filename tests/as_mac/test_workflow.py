"""Workflows of hosted runners name existing scripts, and pass `actionlint`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WHERE = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
ACTIONLINT = shutil.which("actionlint", path=WHERE)
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_workflow_scripts_exist_and_are_executable():
    texts = [path.read_text() for path in WORKFLOWS]
    commands = {word for text in texts for word in re.findall(r"\bscripts/\w+", text)}
    assert {"scripts/setup", "scripts/check", "scripts/test"} <= commands
    assert all(os.access(ROOT / command, os.X_OK) for command in commands)


@pytest.mark.whole
@pytest.mark.skipif(ACTIONLINT is None, reason="needs `scripts/setup dev workflows`")
@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actionlint_accepts_workflows(path: Path):
    assert ACTIONLINT is not None
    result = subprocess.run([ACTIONLINT, str(path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
