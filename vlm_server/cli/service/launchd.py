"""The service as a LaunchAgent of macOS. Not run on a Mac yet."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlm_server.cli.service import files
from vlm_server.cli.service.files import LABEL, ServiceCommand
from vlm_server.cli.service.manager import Files, Run, ServiceState, check, exit_text, run_command

_TRIES = 20
_PAUSE_SECONDS = 0.5
_DRAIN_SECONDS = 60.0
"""How long a service is thought to take to end if launchd does not say."""
_EXIT_TIMEOUT = re.compile(r"exit timeout = (\d+)")
_PID = re.compile(r"^\s*pid = (\d+)$", re.MULTILINE)
_LAST_EXIT = re.compile(r"last exit code = (\d+)")


@dataclass(frozen=True, slots=True)
class Launchd:
    """A LaunchAgent of the current user."""

    home: Path
    run: Run = run_command
    sleep: Callable[[float], None] = time.sleep

    @property
    def path(self) -> Path:
        return self.home / "Library" / "LaunchAgents" / f"{LABEL}.plist"

    @property
    def paths(self) -> Sequence[Path]:
        return (self.path,)

    @property
    def log(self) -> str:
        return str(self._log)

    def render(self, command: ServiceCommand) -> Files:
        return {self.path: files.launchd_plist(command, self._log)}

    def read_words(self) -> list[str]:
        return files.words_of_plist(self.path.read_bytes())

    def read_address(self) -> str:
        return files.address_of_plist(self.path.read_bytes())

    def load(self, *, is_moved: bool) -> None:
        """launchd reads a file only once it has forgotten the service: `is_moved` or not, what
        connects in between is refused.
        """
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self.unload()
        self._wait_until_gone()
        self._bootstrap()

    def unload(self) -> None:
        self.run(("launchctl", "bootout", self._target))

    def forget(self) -> None:
        """Nothing to do: launchd has forgotten the service at `bootout`."""

    def start(self) -> None:
        if self._print().returncode == 0:
            self._try("launchctl", "kickstart", self._target)
        else:
            self._bootstrap()

    def stop(self) -> None:
        self.unload()
        self._wait_until_gone()

    def restart(self) -> None:
        """launchd listens meanwhile."""
        if self.is_running():
            command = ("launchctl", "kill", "SIGTERM", self._target)
            check(self.run(command), command)
            self._wait_until_gone(_pid_of(self._print().stdout))
        self.start()

    def is_running(self) -> bool:
        result = self._print()
        return result.returncode == 0 and "state = running" in result.stdout

    def is_listening(self) -> bool:
        return self._print().returncode == 0

    def state(self) -> ServiceState:
        result = self._print()
        if result.returncode:
            return ServiceState("stopped")
        pid, found = _pid_of(result.stdout), _LAST_EXIT.search(result.stdout)
        code = int(found[1]) if found else None
        last_exit = exit_text(code) if code is not None else None
        if pid is None:
            return ServiceState("restarting" if code else "stopped", last_exit=last_exit)
        since, memory_bytes = self._since(pid), self._memory_bytes(pid)
        return ServiceState("running", pid, since, memory_bytes, last_exit)

    def log_command(self, lines: int, *, follow: bool) -> list[str]:
        return ["tail", "-n", str(lines), *(["-F"] if follow else []), str(self._log)]

    @property
    def _log(self) -> Path:
        return self.home / "Library" / "Logs" / "vlm-server.log"

    @property
    def _domain(self) -> str:
        return f"gui/{os.getuid()}"

    @property
    def _target(self) -> str:
        return f"{self._domain}/{LABEL}"

    def _print(self) -> subprocess.CompletedProcess[str]:
        return self.run(("launchctl", "print", self._target))

    def _bootstrap(self) -> None:
        self._try("launchctl", "bootstrap", self._domain, str(self.path))

    def _try(self, *command: str) -> None:
        """Run a command that may have to wait for launchd's own clean-up."""
        for _ in range(_TRIES):
            result = self.run(command)
            if result.returncode in (0, 127):
                break
            self.sleep(_PAUSE_SECONDS)
        check(result, command)

    def _wait_until_gone(self, pid: int | None = None) -> None:
        """Until process `pid` has ended; without one, until launchd has forgotten the service.

        `bootout` and `kill` return while answers are still finished. Until they are, or launchd has
        killed the process, the next one can't be started.
        """
        waited, most = 0.0, _DRAIN_SECONDS
        while waited < most:
            result = self._print()
            if result.returncode or (pid is not None and _pid_of(result.stdout) != pid):
                return
            if told := _EXIT_TIMEOUT.search(result.stdout):
                most = float(told[1]) + _DRAIN_SECONDS
            self.sleep(_PAUSE_SECONDS)
            waited += _PAUSE_SECONDS

    def _since(self, pid: int) -> str | None:
        return self.run(("ps", "-o", "lstart=", "-p", str(pid))).stdout.strip() or None

    def _memory_bytes(self, pid: int) -> int:
        """Resident bytes of the process and all that it started."""
        rows = self.run(("ps", "-axo", "pid=,ppid=,rss=")).stdout.splitlines()
        table = [[int(word) for word in row.split()] for row in rows if len(row.split()) == 3]
        own, found = set[int](), {pid}
        while found:
            own |= found
            found = {row[0] for row in table if row[1] in own} - own
        return sum(row[2] << 10 for row in table if row[0] in own)


def _pid_of(text: str) -> int | None:
    found = _PID.search(text)
    return int(found[1]) if found else None
