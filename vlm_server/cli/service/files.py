"""The service's files in launchd's and systemd's formats."""

from __future__ import annotations

import math
import plistlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LABEL = "org.vlm-server.daemon"
UNIT = "vlm-server.service"

_RESTART_PAUSE_SECONDS = 10


@dataclass(frozen=True, slots=True)
class ServiceCommand:
    """What a service runs: a program, its arguments, and the time it takes to drain."""

    program: Path
    arguments: Sequence[str]
    drain_seconds: float

    @property
    def words(self) -> list[str]:
        return [str(self.program), *self.arguments]

    @property
    def stop_seconds(self) -> int:
        """Longer than draining, slow readers and the engine's exit take together."""
        return math.ceil(self.drain_seconds) + 20


def launchd_plist(command: ServiceCommand, log: Path) -> bytes:
    """A LaunchAgent: started at login, restarted after a crash but not after `exit 0`."""
    return plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": command.words,
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": _RESTART_PAUSE_SECONDS,
            "ExitTimeOut": command.stop_seconds,
            "ProcessType": "Interactive",  # otherwise macOS throttles it
            "StandardOutPath": str(log),
            "StandardErrorPath": str(log),
            "Umask": 0o077,
        }
    )


def words_of_plist(text: bytes) -> list[str]:
    """The program and arguments in a file made by `launchd_plist`."""
    return [str(word) for word in plistlib.loads(text)["ProgramArguments"]]


def systemd_unit(command: ServiceCommand) -> bytes:
    """A user unit: restarted after a crash, at most five times in five minutes.

    Exit code 2 means wrong settings, where a restart would not help. The sandboxing options are
    those that an unprivileged manager can apply.
    """
    return f"""\
[Unit]
Description=Vision-language model server
StartLimitIntervalSec=300
StartLimitBurst=5

[Service]
Type=exec
ExecStart={" ".join(_quote(word) for word in command.words)}
Restart=on-failure
RestartSec={_RESTART_PAUSE_SECONDS}
RestartPreventExitStatus=2
TimeoutStopSec={command.stop_seconds}
KillMode=mixed
StandardOutput=journal
StandardError=journal
UMask=0077
NoNewPrivileges=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native

[Install]
WantedBy=default.target
""".encode()


def words_of_unit(text: bytes) -> list[str]:
    """The program and arguments in a file made by `systemd_unit`."""
    for line in text.decode().splitlines():
        if line.startswith("ExecStart="):
            words = shlex.split(line.removeprefix("ExecStart="))
            return [word.replace("%%", "%").replace("$$", "$") for word in words]
    return []


def _quote(word: str) -> str:
    """`word` quoted for ExecStart, with everything escaped that systemd expands."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("%", "%%").replace("$", "$$") + '"'
