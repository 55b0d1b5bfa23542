"""Whether an OpenBLAS is there is not guessed from a speed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vlm_server.platform.preload import find_openblas

PROGRAM = "from vlm_server.runner.device.device import has_openblas; print(has_openblas())"


@pytest.mark.skipif(sys.platform != "linux", reason="the preload is for Linux")
def test_preloaded_openblas_is_detected_on_busy_cores(tmp_path: Path):
    preload = find_openblas(tmp_path)
    if not preload:
        pytest.skip("there is no OpenBLAS here")
    for environment, seen in ((preload, "True"), ({}, "False")):
        output = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, **environment},
            capture_output=True,
            check=True,
            text=True,
        )
        assert output.stdout.strip() == seen
