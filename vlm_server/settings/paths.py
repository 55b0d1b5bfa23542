"""Paths as people write them."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | Path) -> Path:
    """`path` with a home folder for its `~`; as it is, where there is no such user or home.

    `Path.expanduser` raises RuntimeError for those.
    """
    return Path(os.path.expanduser(path))
