"""How a Python process of ours is started: nothing in the working folder is ever imported."""

from __future__ import annotations

import os
import sys


def command(module: str, *arguments: str) -> list[str]:
    """Runs `module` as a program.

    `-m` alone would put the working folder first on `sys.path`: a checkpoint's folder with a
    `queue.py` in it, say. `-P` leaves it out.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """Our environment for a child: no imports from the working folder, no preloaded library."""
    inherited = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    folders = inherited.pop("PYTHONPATH", "").split(os.pathsep)
    # An empty entry stands for the working folder, and a relative one begins there.
    if absolute := [folder for folder in folders if os.path.isabs(folder)]:
        inherited["PYTHONPATH"] = os.pathsep.join(absolute)
    return {**inherited, "PYTHONSAFEPATH": "1"}
