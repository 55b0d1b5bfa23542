"""Tests of several workers beside each other, but for those that measure: they run alone."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(folder: Path, alone: bool) -> Iterator[None]:
    """Our turn among all that use `folder`: beside others, or with nobody beside us.

    Who waits to be alone holds the door, so that nobody enters before them.
    """
    with (folder / "door.lock").open("w") as door, (folder / "room.lock").open("w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        if not alone:
            fcntl.flock(room, fcntl.LOCK_SH)
            fcntl.flock(door, fcntl.LOCK_UN)
        else:
            fcntl.flock(room, fcntl.LOCK_EX)
        yield
