"""All that the project needs has wheels for Apple silicon, for each Python that it supports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WHERE = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
UV = shutil.which("uv", path=WHERE)


@pytest.mark.whole
@pytest.mark.skipif(UV is None, reason="needs uv")
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_there_are_wheels(python: str):
    assert UV is not None
    options = f"--quiet --python-platform aarch64-apple-darwin --python-version {python}"
    words = [*options.split(), "--only-binary", ":all:", "--extra", "otel"]
    made = subprocess.run(
        [UV, "pip", "compile", *words, str(ROOT / "pyproject.toml")],
        env={**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert "\nmlx-metal==" in made.stdout
