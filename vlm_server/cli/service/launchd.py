"""The service as a LaunchAgent of macOS. Not run on a Mac yet."""

from __future__ import annotations

import os
import plistlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlm_server.cli.service.manager import (
    MAX_FILES,
    RESTART_PAUSE_SECONDS,
    Files,
    RunCommand,
    ServiceCommand,
    ServiceManager,
    ServicePhase,
    ServiceState,
    check,
    exit_text,
    join_address,
    run_command,
)

LABEL = "org.vlm-server.daemon"
_SOCKET = "http"
_TRIES = 20
_PAUSE_SECONDS = 0.5
_DRAIN_SECONDS = 60.0
"""Assumed time of a service to end, if launchd reports none."""
_EXIT_TIMEOUT = re.compile(r"exit timeout = (\d+)")
_DOMAINS = ("gui", "user")
"""Domains of a user logged in at the screen, and of one logged in by SSH only."""
_NO_DOMAIN = 125
_NOT_INSTALLED = 127
_PID = re.compile(r"^\s*pid = (\d+)$", re.MULTILINE)
_LAST_EXIT = re.compile(r"last exit code = (\d+)")
_LAST_SIGNAL = re.compile(r"last terminating signal = (.+)")


@dataclass(frozen=True, slots=True)
class Launchd(ServiceManager):
    """LaunchAgent of the current user."""

    home: Path
    run: RunCommand = run_command
    sleep: Callable[[float], None] = time.sleep

    @property
    def paths(self) -> Sequence[Path]:
        return (self.home / "Library" / "LaunchAgents" / f"{LABEL}.plist",)

    @property
    def log(self) -> str:
        return str(self._log)

    def render(self, command: ServiceCommand) -> Files:
        has_screen = self._domain.startswith("gui")
        return {self.path: launchd_plist(command, self._log, has_screen=has_screen)}

    def read_words(self) -> list[str]:
        return [str(word) for word in plistlib.loads(self.path.read_bytes())["ProgramArguments"]]

    def read_address(self) -> str:
        listener = plistlib.loads(self.path.read_bytes())["Sockets"][_SOCKET]
        return join_address(listener["SockNodeName"], listener["SockServiceName"])

    def load(self, *, is_moved: bool) -> None:
        """See `ServiceManager`. launchd forgets the service first, and then refuses connections."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self.unload()
        self._wait_until_gone()
        self._bootstrap()

    def unload(self) -> None:
        if job := self._find_loaded():
            self.run(("launchctl", "bootout", job.target))

    def forget(self) -> None:
        """Wait for the last answers: launchd forgets the service, and its port, after them."""
        self._wait_until_gone()

    def start(self) -> None:
        if job := self._find_loaded():
            self._try("launchctl", "kickstart", job.target)
        else:
            self._bootstrap()

    def stop(self) -> None:
        self.unload()
        self._wait_until_gone()

    def restart(self) -> None:
        """See `ServiceManager`. launchd listens during the restart."""
        job = self._find_loaded()
        if job and job.is_running:
            self.check("launchctl", "kill", "SIGTERM", job.target)
            self._wait_until_gone(job.pid)
        self.start()

    def is_running(self) -> bool:
        return bool((job := self._find_loaded()) and job.is_running)

    def is_listening(self) -> bool:
        return self._find_loaded() is not None

    def state(self) -> ServiceState:
        job = self._find_loaded()
        if job is None:
            return ServiceState("stopped")
        last_exit, pid = job.last_exit, job.pid
        if pid is None:
            return ServiceState(job.state, last_exit=last_exit)
        since = self.run(("ps", "-o", "lstart=", "-p", str(pid))).stdout.strip() or None
        return ServiceState("running", pid, since, self._memory_bytes(pid), last_exit)

    def log_command(self, lines: int, *, follow: bool) -> list[str]:
        return ["tail", "-n", str(lines), *(["-F"] if follow else []), str(self._log)]

    @property
    def _log(self) -> Path:
        return self.home / "Library" / "Logs" / "vlm-server.log"

    @property
    def _domain(self) -> str:
        """The domain of services: `gui` exists only with a login at the screen."""
        gui_domain, user_domain = (f"{name}/{os.getuid()}" for name in _DOMAINS)
        return (
            gui_domain
            if self.run(("launchctl", "print", gui_domain)).returncode == 0
            else user_domain
        )

    def _find_loaded(self) -> _LoadedService | None:
        for name in _DOMAINS:
            target = f"{name}/{os.getuid()}/{LABEL}"
            if (result := self.run(("launchctl", "print", target))).returncode == 0:
                return _LoadedService(target, result.stdout)
        return None

    def _bootstrap(self) -> None:
        domain = self._domain
        # If it is switched off among the login items, the error is only "5: Input/output error".
        self.run(("launchctl", "enable", f"{domain}/{LABEL}"))
        self._try("launchctl", "bootstrap", domain, str(self.path))

    def _try(self, *command: str) -> None:
        """Run a command, again if it fails during launchd's own clean-up."""
        for _ in range(_TRIES):
            result = self.run(command)
            if result.returncode in (0, _NO_DOMAIN, _NOT_INSTALLED):
                break
            self.sleep(_PAUSE_SECONDS)
        check(result, command)

    def _wait_until_gone(self, pid: int | None = None) -> None:
        """Wait for the end of process `pid`, or until launchd has forgotten the service.

        `bootout` and `kill` return before the last answers are finished; nothing can start before.
        """
        waited, limit = 0.0, _DRAIN_SECONDS
        while waited < limit:
            job = self._find_loaded()
            if job is None or (pid is not None and job.pid != pid):
                return
            if told := _EXIT_TIMEOUT.search(job.text):
                limit = float(told[1]) + _DRAIN_SECONDS
            self.sleep(_PAUSE_SECONDS)
            waited += _PAUSE_SECONDS

    def _memory_bytes(self, pid: int) -> int:
        """The resident bytes of the process and its descendants."""
        rows = self.run(("ps", "-axo", "pid=,ppid=,rss=")).stdout.splitlines()
        table = [[int(word) for word in row.split()] for row in rows if len(row.split()) == 3]
        pids, new_pids = set[int](), {pid}
        while new_pids:
            pids |= new_pids
            new_pids = {row[0] for row in table if row[1] in pids} - pids
        return sum(row[2] << 10 for row in table if row[0] in pids)


@dataclass(frozen=True, slots=True)
class _LoadedService:
    """A service that launchd knows as `target`, and the text of `launchctl print`."""

    target: str
    text: str

    @property
    def pid(self) -> int | None:
        return self._number(_PID)

    @property
    def last_exit(self) -> str | None:
        """The end of its last process; None before."""
        if match := _LAST_SIGNAL.search(self.text):
            return match[1]
        code = self._number(_LAST_EXIT)
        return None if code is None else exit_text(code)

    @property
    def is_running(self) -> bool:
        return "state = running" in self.text

    @property
    def state(self) -> ServicePhase:
        """The phase of a service without a process."""
        if self.last_exit is None:
            return "starting"
        if self._number(_LAST_EXIT) != 0:
            return "restarting"
        # launchd lets some seconds pass between two starts
        return "starting" if "state = spawn scheduled" in self.text else "stopped"

    def _number(self, pattern: re.Pattern[str]) -> int | None:
        return int(match[1]) if (match := pattern.search(self.text)) else None


def launchd_plist(command: ServiceCommand, log: Path, *, has_screen: bool = True) -> bytes:
    """LaunchAgent file: started at login, restarted after a crash but not after `exit 0`.

    Unless the installing user `has_screen`, a login by SSH starts it, too. launchd does not
    distinguish other statuses, so the daemon gives up with 0. launchd listens during restarts.
    """
    own_options = ["--give-up-status", "0", "--log-file", str(log), "--launchd-socket", _SOCKET]
    return plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": [*command.words, *own_options],
            "Sockets": {
                _SOCKET: {
                    "SockNodeName": command.host,
                    "SockServiceName": str(command.port),
                    "SockFamily": "IPv6" if ":" in command.host else "IPv4",
                    "SockType": "stream",
                }
            },
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": RESTART_PAUSE_SECONDS,
            "ExitTimeOut": command.stop_seconds,
            "ProcessType": "Interactive",  # otherwise macOS throttles it
            "StandardOutPath": str(log),
            "StandardErrorPath": str(log),
            "Umask": 0o077,
            "SoftResourceLimits": {"NumberOfFiles": MAX_FILES},
            **({} if has_screen else {"LimitLoadToSessionType": ["Aqua", "Background"]}),
        }
    )
