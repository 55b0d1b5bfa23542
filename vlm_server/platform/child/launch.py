"""Command and environment of a Python process of ours, which imports nothing from its folder."""

from __future__ import annotations

import os
import site
import sys
from pathlib import Path

import vlm_server

FOLDER = "/"
"""The working folder of processes that need none: nobody plants files there."""
_ROOT = str(Path(vlm_server.__file__).parents[1])
"""The folder that `vlm_server` was imported from."""


def command(module: str, *arguments: str) -> list[str]:
    """The command that runs `module` as a program.

    `-m` alone would put the working folder first on `sys.path`: a checkpoint's folder with a
    `queue.py` in it, say. `-P` leaves it out.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(*, with_preload: bool = False) -> dict[str, str]:
    """Our environment for a child: it imports what we do, and nothing from the working folder.

    Libraries that `LD_PRELOAD` names are only for those that run models.
    """
    inherited = {name: os.environ[name] for name in os.environ if name != "LD_PRELOAD"}
    if with_preload and (preloaded := os.environ.get("LD_PRELOAD")):
        inherited["LD_PRELOAD"] = preloaded
    folders = inherited.pop("PYTHONPATH", "").split(os.pathsep)
    # An empty entry stands for the working folder, and a relative one begins there.
    absolute = [folder for folder in folders if os.path.isabs(folder)]
    if _ROOT not in (*absolute, *site.getsitepackages()):
        absolute = [_ROOT, *absolute]
    if absolute:
        inherited["PYTHONPATH"] = os.pathsep.join(absolute)
    return {**inherited, "PYTHONSAFEPATH": "1"}
