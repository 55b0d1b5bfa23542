"""The service as units of the user's systemd manager: one runs it, one listens for it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vlm_server.cli.service import files
from vlm_server.cli.service.files import SOCKET_UNIT, UNIT, ServiceCommand
from vlm_server.cli.service.manager import (
    Files,
    Run,
    ServiceState,
    State,
    check,
    exit_text,
    run_command,
)

_STATES: dict[str, State] = {
    "active": "running",
    "reloading": "running",
    "activating": "running",
    "deactivating": "stopping",
    "failed": "failed",
}
_PROPERTIES = (
    *("ActiveState", "SubState", "MainPID", "MemoryCurrent", "ActiveEnterTimestamp"),
    *("ExecMainCode", "ExecMainStatus", "NRestarts"),
)
_EXITED, _RUNNING = "1", "0"
"""Of `ExecMainCode`: CLD_EXITED, and a process that has not ended."""


@dataclass(frozen=True, slots=True)
class SystemdUser:
    """Units of the user's systemd manager; `config_home` replaces `~/.config`."""

    home: Path
    run: Run = run_command
    config_home: Path | None = None

    @property
    def path(self) -> Path:
        return self._folder / UNIT

    @property
    def paths(self) -> Sequence[Path]:
        return (self.path, self._folder / SOCKET_UNIT)

    @property
    def log(self) -> str:
        return f"journalctl --user-unit {UNIT}"

    def render(self, command: ServiceCommand) -> Files:
        texts = (files.systemd_unit(command), files.systemd_socket(command))
        return dict(zip(self.paths, texts, strict=True))

    def read_words(self) -> list[str]:
        return files.words_of_unit(self.path.read_bytes())

    def read_address(self) -> str:
        path = self.paths[1]
        return files.address_of_socket(path.read_bytes()) if path.exists() else ""

    def load(self, *, is_moved: bool) -> None:
        self._check("daemon-reload")
        self._check("enable", *self._units)
        if is_moved:  # a socket can't be had anew while its service runs
            self.stop()
            self.start()
        else:
            self.restart()

    def unload(self) -> None:
        self._run("disable", "--now", *self._units)

    def forget(self) -> None:
        self._run("daemon-reload")

    def start(self) -> None:
        # One that has failed too often does not start otherwise; one that has not is no error.
        self._run("reset-failed", *self._units)
        for unit in self._units:
            self._check("start", unit)

    def stop(self) -> None:
        self._check("stop", *self._units)

    def restart(self) -> None:
        if not self.is_running():
            self.start()
            return
        if SOCKET_UNIT in self._units:  # it says no if the service listens by itself
            self._run("start", SOCKET_UNIT)
        self._check("restart", UNIT)

    def is_running(self) -> bool:
        return self._run("is-active", "--quiet", UNIT).returncode == 0

    def is_listening(self) -> bool:
        return any(self._run("is-active", "--quiet", each).returncode == 0 for each in self._units)

    def state(self) -> ServiceState:
        words = [word for name in _PROPERTIES for word in ("--property", name)]
        lines = self._run("show", UNIT, *words).stdout.splitlines()
        shown = dict(line.split("=", 1) for line in lines if "=" in line)
        pid, memory = shown.get("MainPID", ""), shown.get("MemoryCurrent", "")
        state = _STATES.get(shown.get("ActiveState", ""), "stopped")
        if shown.get("SubState") == "auto-restart":
            state = "restarting"
        return ServiceState(
            state=state,
            pid=int(pid) if pid.isdecimal() and pid != "0" else None,
            since=shown.get("ActiveEnterTimestamp") or None,
            memory_bytes=int(memory) if memory.isdecimal() and len(memory) < 19 else None,
            last_exit=_last_exit(shown),
        )

    def log_command(self, lines: int, *, follow: bool) -> list[str]:
        command = ["journalctl", "--user-unit", UNIT, "--lines", str(lines), "--no-pager"]
        return [*command, "--output", "cat", *(["--follow"] if follow else [])]

    @property
    def _units(self) -> list[str]:
        """The socket first; earlier versions had none."""
        return [path.name for path in reversed(self.paths) if path.exists()] or [UNIT]

    @property
    def _folder(self) -> Path:
        return (self.config_home or self.home / ".config") / "systemd" / "user"

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run(("systemctl", "--user", *words))

    def _check(self, *words: str) -> None:
        command = ("systemctl", "--user", *words)
        check(self.run(command), command)


def _last_exit(shown: dict[str, str]) -> str | None:
    """Of the process that ended last, or how often it was started again."""
    code, status = shown.get("ExecMainCode", _RUNNING), shown.get("ExecMainStatus", "")
    if code == _EXITED and status.isdecimal():
        return exit_text(int(status))
    if code != _RUNNING:
        return f"ended by signal {status}"
    count = shown.get("NRestarts", "0")
    return f"started again {count} times after a crash" if count not in ("0", "") else None
