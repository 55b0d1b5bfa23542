"""The child processes of a process."""

from __future__ import annotations

import subprocess


def children_of(pid: int) -> list[int]:
    done = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True)
    return [int(pid_text) for pid_text in done.stdout.split()]
