"""What `launchctl print` says of a job, in the lines of macOS 14."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.as_mac.launchd import Job


def print_text(job: Job) -> str:
    """The text, reduced to lines that a reader may look for."""
    running = job.process is not None
    state = "running" if running else "not running" if job.due is None else "spawn scheduled"
    words = job.plist["ProgramArguments"]
    lines = [
        f"active count = {int(running)}",
        f"path = {job.path}",
        "type = LaunchAgent",
        f"state = {state}",
        "",
        f"program = {words[0]}",
        "arguments = {",
        *(f"\t{word}" for word in words),
        "}",
        "",
        f"stdout path = {job.plist['StandardOutPath']}",
        f"domain = {job.domain} [100003]",
        f"minimum runtime = {job.plist.get('ThrottleInterval', 10)}",
        f"exit timeout = {job.plist.get('ExitTimeOut', 5)}",
        f"runs = {job.runs}",
    ]
    if job.process is not None:
        lines.append(f"pid = {job.process.pid}")
    lines.append(_last_end(job.status))
    return "\n\t".join([f"{job.target} = {{", *lines]) + "\n}\n"


def _last_end(status: int | None) -> str:
    if status is None:
        return "last exit code = (never exited)"
    if status < 0:
        return f"last terminating signal = {signal.strsignal(-status)}: {-status}"
    return f"last exit code = {status}"
