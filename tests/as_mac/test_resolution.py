"""All dependencies have wheels for Apple silicon, for each supported Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNREACHABLE = ("error sending request", "the network was disabled")
"""Messages of uv without a reachable package index."""


@pytest.mark.whole
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_dependencies_have_wheels_for_apple_silicon(python: str):
    options = f"--quiet --python-platform aarch64-apple-darwin --python-version {python}"
    words = [*options.split(), "--only-binary", ":all:", "--extra", "otel"]
    resolution = subprocess.run(
        [sys.executable, "-m", "uv", "pip", "compile", *words, str(ROOT / "pyproject.toml")],
        env={**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if any(words in resolution.stderr for words in UNREACHABLE):
        pytest.skip("the package index can't be reached")
    assert resolution.returncode == 0, resolution.stderr
    assert "\nmlx-metal==" in resolution.stdout
