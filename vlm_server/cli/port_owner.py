"""The program that listens on a port, as far as the system tells."""

from __future__ import annotations

import contextlib
import glob
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_LISTENS = "0A"
"""State of a listening socket in Linux's tables."""
_SECONDS = 10.0


def owner(port: int) -> str:
    """The program that listens on `port`, if the system tells."""
    if sys.platform == "darwin":
        words = ("lsof", "-nP", f"-iTCP:{port}", "-sTCP:LISTEN", "-Fpc")
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            run = subprocess.run(words, capture_output=True, timeout=_SECONDS, check=False)
            return owner_in_lsof(run.stdout.decode(errors="replace"))
        return "a program"
    sockets = dict(listening(port))
    for link in glob.iglob("/proc/[0-9]*/fd/*") if sockets else ():
        with contextlib.suppress(OSError):  # closed since
            inode = os.readlink(link).removeprefix("socket:[").removesuffix("]")
            if inode in sockets:
                pid = link.split("/")[2]
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                return f"{name} (process {pid}, user {_user(sockets[inode])})"
    return f"a program of user {_user(next(iter(sockets.values())))}" if sockets else "a program"


def owner_in_lsof(output: str) -> str:
    """The program in the output of `lsof -Fpc`: `p` is the process's id, `c` its command."""
    fields = {line[0]: line[1:] for line in reversed(output.splitlines()) if line}
    if "p" not in fields:
        return "a program of another user"
    return f"{fields.get('c', 'a program')} (process {fields['p']})"


def listening(port: int, root: Path = Path("/")) -> Iterator[tuple[str, int]]:
    """The inode and user of each socket that listens on `port` (Linux)."""
    for name in ("tcp", "tcp6"):
        try:
            lines = (root / "proc/net" / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == _LISTENS and int(words[1].rpartition(":")[2], 16) == port:
                yield words[9], int(words[7])


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
