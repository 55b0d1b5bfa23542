"""The two managers of a user's services, launchd and systemd.

The function that runs a command is an argument, so that tests can see what would be run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vlm_server.cli.failure import CommandFailed
from vlm_server.cli.service import files
from vlm_server.cli.service.files import LABEL, UNIT, ServiceCommand

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]

_BOOTSTRAP_TRIES = 20
_PAUSE_SECONDS = 0.5
_DRAIN_SECONDS = 60.0
"""How long a service is thought to take to end if launchd does not say."""
_EXIT_TIMEOUT = re.compile(r"exit timeout = (\d+)")


def run_command(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run `words`; a missing program counts as one that failed."""
    if shutil.which(words[0]) is None:
        return subprocess.CompletedProcess(words, 127, "", f"{words[0]} is not installed")
    return subprocess.run(words, capture_output=True, text=True, check=False)


class ServiceManager(Protocol):
    """Where the service's file is, what is in it, and how it is loaded."""

    @property
    def path(self) -> Path: ...

    def render(self, command: ServiceCommand) -> bytes: ...

    def read_words(self) -> list[str]:
        """The command line in the installed file. Raises OSError if there is no file."""
        ...

    def load(self) -> None:
        """Start the service now and at every login. Raises CommandFailed."""
        ...

    def unload(self) -> None:
        """Stop the service, if it runs, and do not start it again."""
        ...

    def is_running(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Launchd:
    """A LaunchAgent of the current user."""

    home: Path
    run: Run = run_command
    sleep: Callable[[float], None] = time.sleep

    @property
    def path(self) -> Path:
        return self.home / "Library" / "LaunchAgents" / f"{LABEL}.plist"

    def render(self, command: ServiceCommand) -> bytes:
        return files.launchd_plist(command, self.home / "Library/Logs/vlm-server.log")

    def read_words(self) -> list[str]:
        return files.words_of_plist(self.path.read_bytes())

    def load(self) -> None:
        (self.home / "Library" / "Logs").mkdir(parents=True, exist_ok=True)
        self.unload()
        self._wait_until_gone()
        command = ("launchctl", "bootstrap", self._domain, str(self.path))
        for _ in range(_BOOTSTRAP_TRIES):
            result = self.run(command)
            if result.returncode in (0, 127):
                break
            self.sleep(_PAUSE_SECONDS)
        _check(result, command)

    def _wait_until_gone(self) -> None:
        """`bootout` returns while the old service still finishes its answers.

        Until that has ended, or launchd has killed it, the new one can't be loaded.
        """
        waited, most = 0.0, _DRAIN_SECONDS
        while waited < most:
            result = self.run(("launchctl", "print", f"{self._domain}/{LABEL}"))
            if result.returncode:
                return
            if told := _EXIT_TIMEOUT.search(result.stdout):
                most = float(told[1]) + _DRAIN_SECONDS
            self.sleep(_PAUSE_SECONDS)
            waited += _PAUSE_SECONDS

    def unload(self) -> None:
        self.run(("launchctl", "bootout", f"{self._domain}/{LABEL}"))

    def is_running(self) -> bool:
        result = self.run(("launchctl", "print", f"{self._domain}/{LABEL}"))
        return result.returncode == 0 and "state = running" in result.stdout

    @property
    def _domain(self) -> str:
        return f"gui/{os.getuid()}"


@dataclass(frozen=True, slots=True)
class SystemdUser:
    """A unit of the user's systemd manager; `config_home` replaces `~/.config`."""

    home: Path
    run: Run = run_command
    config_home: Path | None = None

    @property
    def path(self) -> Path:
        return (self.config_home or self.home / ".config") / "systemd" / "user" / UNIT

    def render(self, command: ServiceCommand) -> bytes:
        return files.systemd_unit(command)

    def read_words(self) -> list[str]:
        return files.words_of_unit(self.path.read_bytes())

    def load(self) -> None:
        for words in (("daemon-reload",), ("enable", UNIT)):
            command = ("systemctl", "--user", *words)
            _check(self.run(command), command)
        # One that has failed too often does not start otherwise; one that has not is no error.
        self.run(("systemctl", "--user", "reset-failed", UNIT))
        command = ("systemctl", "--user", "restart", UNIT)
        _check(self.run(command), command)

    def unload(self) -> None:
        self.run(("systemctl", "--user", "disable", "--now", UNIT))

    def is_running(self) -> bool:
        return self.run(("systemctl", "--user", "is-active", "--quiet", UNIT)).returncode == 0


def manager_for(platform: str, home: Path, environment: Mapping[str, str]) -> ServiceManager:
    """The manager of this system; `platform` is `sys.platform`."""
    if platform == "darwin":
        return Launchd(home)
    config_home = environment.get("XDG_CONFIG_HOME", "")
    return SystemdUser(home, config_home=Path(config_home) if os.path.isabs(config_home) else None)


def _check(result: subprocess.CompletedProcess[str], command: Sequence[str]) -> None:
    if result.returncode:
        reason = (result.stderr or result.stdout).strip() or f"status {result.returncode}"
        raise CommandFailed(
            f"the file is written, but '{' '.join(command)}' failed: {reason}\n"
            "Run 'vlm-server service install' again when that command works."
        )
