"""Tries libraries in a child process before they are preloaded into the engine.

A library that loads may still end the process, or not do what it is for.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from vlm_server.platform.child import launch

_SECONDS = 20.0


def runs(program: str, environment: Mapping[str, str]) -> bool:
    """Whether Python runs `program` to its end in time, with `environment` beside ours."""
    try:
        probe = subprocess.run(
            [sys.executable, "-I", "-S", "-c", program],
            env={**os.environ, **environment},
            cwd=launch.FOLDER,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return probe.returncode == 0
