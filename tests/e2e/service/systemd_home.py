"""A systemd user manager with a journal, in namespaces of its own.

Its /run and control groups are private; files and network are the machine's.
Needs root, for the namespaces."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_START = """
echo $$ > "$GROUP/cgroup.procs"
exec unshare --mount --cgroup --pid --fork --kill-child --mount-proc sh -c "$INSIDE"
"""
_INSIDE = """
set -e
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system /run/systemd/journal /run/systemd/journald.conf.d /run/log/journal
mkdir -p "$XDG_RUNTIME_DIR"
printf '[Journal]\\nReadKMsg=no\\nAudit=no\\nStorage=volatile\\n' \\
    > /run/systemd/journald.conf.d/test.conf
/lib/systemd/systemd-journald &
group=/sys/fs/cgroup/user.slice/user-0.slice/user@0.service
mkdir -p $group
sh -c "echo \\$\\$ > $group/cgroup.procs && exec systemd --user" &
wait
"""
_TOOLS = ("systemd", "systemctl", "journalctl", "unshare", "nsenter")


def missing() -> str | None:
    """The reason why no manager can run here, or None."""
    if sys.platform != "linux" or os.getuid() != 0:
        return "needs Linux, and root for namespaces"
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent or not Path("/lib/systemd/systemd-journald").exists():
        return f"needs {', '.join(absent) or 'journald'}"
    return None if _groups() else "needs control groups, version 2"


@dataclass(frozen=True)
class SystemdHome:
    """The home folder of a user with a manager; runs commands there."""

    home: Path
    pid: int
    environment: Mapping[str, str]

    @property
    def units(self) -> Path:
        return self.home / ".config/systemd/user"

    def service(self, *words: str, timeout: float = 180.0) -> subprocess.CompletedProcess[str]:
        """`vlm-server service WORDS`."""
        return self.run(*self.program, "service", *words, timeout=timeout)

    @property
    def program(self) -> list[str]:
        return [sys.executable, "-m", "vlm_server.cli"]

    def run(self, *words: str, timeout: float = 30.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words),
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )

    def command(self, *words: str) -> list[str]:
        enter = ("nsenter", "--target", str(self.pid), "--mount", "--pid", "--cgroup")
        return [*enter, *words]


@contextmanager
def systemd_home(folder: Path) -> Iterator[SystemdHome]:
    """Start a manager; end it and all its processes afterwards."""
    group = _groups() / f"vlm-server-test-{os.getpid()}"  # type: ignore[operator]
    group.mkdir()
    names = ("PATH", "LANG", "PYTHONPATH", "LD_LIBRARY_PATH")
    environment = {
        **{name: os.environ[name] for name in names if name in os.environ},
        "HOME": str(folder),
        "XDG_RUNTIME_DIR": "/run/user/0",
        "XDG_CONFIG_HOME": str(folder / ".config"),
        "GROUP": str(group),
        "INSIDE": _INSIDE,
    }
    with (folder / "systemd.log").open("wb") as log:
        outer = subprocess.Popen(
            ["sh", "-c", _START], env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        home = SystemdHome(folder, _only_child(outer.pid), environment)
        _wait_until_it_runs(home)
        yield home
    finally:
        outer.kill()  # and with it the whole namespace
        outer.wait()
        _remove(group)


def _groups() -> Path | None:
    """The mount point of control groups of version 2."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, folder, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(folder)
    return None


def _only_child(pid: int) -> int:
    deadline = time.monotonic() + 10
    while True:
        with contextlib.suppress(OSError, ValueError):
            return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _wait_until_it_runs(home: SystemdHome) -> None:
    deadline = time.monotonic() + 20
    while home.run("systemctl", "--user", "is-system-running").stdout.strip() != "running":
        assert time.monotonic() < deadline, (home.home / "systemd.log").read_text()
        time.sleep(0.1)


def _remove(group: Path) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            for folder, _, _ in os.walk(group, topdown=False):
                os.rmdir(folder)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        else:
            return
