"""A manager of a user's services, launchd or systemd: its interface, and what both share."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from vlm_server.cli import exit_codes
from vlm_server.cli.exit_codes import CommandFailed

RunCommand = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]
ServicePhase = Literal["starting", "running", "restarting", "stopping", "stopped", "failed"]
Files = dict[Path, bytes]
"""Contents of the service's files by path, the main one first."""

RESTART_PAUSE_SECONDS = 10
MAX_FILES = 16_384
"""Limit on open files and connections: the default is 1,024 on many systems, 256 on macOS."""
_STOP_MARGIN_SECONDS = 25
_MEANINGS = {
    0: "stopped",
    exit_codes.FAILURE: "it crashed",
    exit_codes.WRONG_SETTINGS: "wrong settings",
    exit_codes.MODEL_UNUSABLE: "the model can't be loaded",
    exit_codes.NOT_AVAILABLE: "something that the settings name is not there at present",
}


@dataclass(frozen=True, slots=True)
class ServiceCommand:
    """The command line of a service, and the IP address and port where its manager listens for it.

    Raises CommandFailed for words with control characters, or bytes that are not UTF-8.
    """

    program: Path
    arguments: Sequence[str]
    host: str
    port: int
    drain_seconds: float

    def __post_init__(self) -> None:
        for word in self.words:
            if any(_is_unwritable(char) for char in word) or "\n" in str(self.program):
                raise CommandFailed(f"a service's file can't hold {word!r}")

    @property
    def words(self) -> list[str]:
        return [str(self.program), *self.arguments]

    @property
    def stop_seconds(self) -> int:
        """Time for last requests, draining, slow readers and the engine's exit, with a margin."""
        return math.ceil(self.drain_seconds) + _STOP_MARGIN_SECONDS


@dataclass(frozen=True, slots=True)
class ServiceState:
    """The state of the service as reported by its manager; None where not reported.

    `starting` is before the first process, `restarting` between a crash and the next try, `failed`
    after the last one. `memory_bytes` are those of all processes.
    """

    state: ServicePhase
    pid: int | None = None
    since: str | None = None
    memory_bytes: int | None = None
    last_exit: str | None = None


def run_command(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run `words`; a missing program counts as one that failed."""
    if shutil.which(words[0]) is None:
        return subprocess.CompletedProcess(words, 127, "", f"{words[0]} is not installed")
    return subprocess.run(words, capture_output=True, text=True, check=False)


def check(result: subprocess.CompletedProcess[str], command: Sequence[str]) -> None:
    """Raises CommandFailed if `command` did not succeed."""
    if result.returncode:
        reason = (result.stderr or result.stdout).strip() or f"exit code {result.returncode}"
        raise CommandFailed(f"{' '.join(command)}: {reason}")


class ServiceManager(Protocol):
    """A user's service: its files, and how it is started and stopped.

    `run` runs a command of the system; tests give another.
    """

    @property
    def run(self) -> RunCommand: ...

    @property
    def paths(self) -> Sequence[Path]:
        """All files, the main one first."""

    @property
    def path(self) -> Path:
        """Main file."""
        return self.paths[0]

    @property
    def log(self) -> str:
        """Log file, or a command that shows the log."""

    def render(self, command: ServiceCommand) -> Files: ...

    def files(self) -> Files:
        """The contents of the installed files."""
        return {path: path.read_bytes() for path in self.paths if path.exists()}

    def read_words(self) -> list[str]:
        """The command line in the installed file, empty without one. Raises OSError."""

    def read_address(self) -> str:
        """The address in the installed files; empty if they name none. Raises OSError."""

    def load(self, *, is_moved: bool) -> None:
        """Read the files anew and start the service, now and at every login. Raises CommandFailed.

        Unless `is_moved` to another address, no client of the running service is refused.
        """

    def unload(self) -> None:
        """Stop the service, if it runs, and do not start it again. Its files may be removed."""

    def forget(self) -> None:
        """Let the service manager forget the service: its files are gone."""

    def start(self) -> None:
        """Start the service. Raises CommandFailed."""

    def stop(self) -> None:
        """Stop the service until it is started, or until the next login. Raises CommandFailed."""

    def restart(self) -> None:
        """Finish answers, then start again. Raises CommandFailed."""

    def is_running(self) -> bool: ...

    def is_listening(self) -> bool:
        """Whether the installed address is in use, by the service or for it."""

    def state(self) -> ServiceState: ...

    def log_command(self, lines: int, *, follow: bool) -> list[str]:
        """A command that prints the end of the log."""

    def check(self, *command: str) -> None:
        """Run `command`. Raises CommandFailed if it does not succeed."""
        check(self.run(command), command)


def join_address(host: str, port: int | str) -> str:
    """`HOST:PORT`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """The host and port of what `join_address` returned; 0 for no port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port or 0)


def exit_text(code: int) -> str:
    """An exit code of the daemon, with its meaning."""
    meaning = _MEANINGS.get(code)
    return f"{code} ({meaning})" if meaning else str(code)


def manager_for(platform: str, home: Path, environment: Mapping[str, str]) -> ServiceManager:
    """The manager of this system's services; `platform` is `sys.platform`."""
    from vlm_server.cli.service.launchd import Launchd
    from vlm_server.cli.service.systemd import SystemdUser

    if platform == "darwin":
        return Launchd(home)
    config_home = environment.get("XDG_CONFIG_HOME", "")
    return SystemdUser(home, config_home=Path(config_home) if os.path.isabs(config_home) else None)


def _is_unwritable(char: str) -> bool:
    is_control = (ord(char) < 32 and char not in "\n\t") or ord(char) == 127
    return is_control or 0xD800 <= ord(char) <= 0xDFFF
