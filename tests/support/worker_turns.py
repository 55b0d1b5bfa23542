"""Tests of several workers run at the same time, except those that measure: they run alone."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(folder: Path, alone: bool) -> Iterator[None]:
    """A test's turn among all that use `folder`: at the same time as others, or alone.

    A test that waits to run alone holds the door, so that no other test enters before it.
    """
    with (folder / "door.lock").open("w") as door, (folder / "room.lock").open("w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        if not alone:
            fcntl.flock(room, fcntl.LOCK_SH)
            fcntl.flock(door, fcntl.LOCK_UN)
        else:
            fcntl.flock(room, fcntl.LOCK_EX)
        yield
