"""The service's files in launchd's and systemd's formats."""

from __future__ import annotations

import math
import plistlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vlm_server.cli import exit_codes
from vlm_server.cli.failure import CommandFailed

LABEL = "org.vlm-server.daemon"
UNIT = "vlm-server.service"

_RESTART_PAUSE_SECONDS = 10
_MAX_FILES = 16_384
"""Open files and connections: many systems allow 1,024, macOS 256."""
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "%": "%%"}
_UNESCAPES = {"n": "\n", "t": "\t"}
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_GIVE_UP_QUIETLY = ["--give-up-status", "0"]


@dataclass(frozen=True, slots=True)
class ServiceCommand:
    """What a service runs: a program, its arguments, and the time it takes to drain.

    Raises CommandFailed for words that the files can't hold: with control characters, or bytes that
    are not UTF-8.
    """

    program: Path
    arguments: Sequence[str]
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
        """Longer than draining, slow readers and the engine's exit take together."""
        return math.ceil(self.drain_seconds) + 20


def launchd_plist(command: ServiceCommand, log: Path) -> bytes:
    """A LaunchAgent: started at login, restarted after a crash but not after `exit 0`.

    launchd tells no other statuses apart, so the daemon gives up with that.
    """
    return plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": [*command.words, *_GIVE_UP_QUIETLY],
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": _RESTART_PAUSE_SECONDS,
            "ExitTimeOut": command.stop_seconds,
            "ProcessType": "Interactive",  # otherwise macOS throttles it
            "StandardOutPath": str(log),
            "StandardErrorPath": str(log),
            "Umask": 0o077,
            "SoftResourceLimits": {"NumberOfFiles": _MAX_FILES},
        }
    )


def words_of_plist(text: bytes) -> list[str]:
    """The program and arguments in a file made by `launchd_plist`."""
    words = [str(word) for word in plistlib.loads(text)["ProgramArguments"]]
    end = len(words) - len(_GIVE_UP_QUIETLY)
    return words[:end] if words[end:] == _GIVE_UP_QUIETLY else words


def systemd_unit(command: ServiceCommand) -> bytes:
    """A user unit: restarted after a crash, and until what it waits for is there.

    Not restarted after the exit codes that mean that a restart would not help. The kernel may kill
    the engine for want of memory: the front starts another, so systemd goes on. The sandboxing
    options are those that an unprivileged manager can apply.
    """
    program, *arguments = command.words
    # systemd expands variables in arguments, but not in the path of the program.
    quoted = [_quote(program), *(_quote(word).replace("$", "$$") for word in arguments)]
    return f"""\
[Unit]
Description=Vision-language model server
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart={" ".join(quoted)}
Restart=on-failure
RestartSec={_RESTART_PAUSE_SECONDS}
RestartPreventExitStatus={" ".join(map(str, exit_codes.FINAL))}
OOMPolicy=continue
LimitNOFILE={_MAX_FILES}
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
    for line in text.decode().split("\n"):
        if line.startswith("ExecStart="):
            program, *arguments = map(_unquote, _QUOTED.findall(line))
            return [program, *(word.replace("$$", "$") for word in arguments)]
    return []


def _quote(word: str) -> str:
    """`word` quoted for ExecStart, with all escaped but `$`."""
    return '"' + "".join(_ESCAPES.get(char, char) for char in word) + '"'


def _unquote(text: str) -> str:
    """The reverse of `_quote`, of what is between the quotes."""
    plain = re.sub(r"\\(.)", lambda match: _UNESCAPES.get(match[1], match[1]), text)
    return plain.replace("%%", "%")


def _is_unwritable(char: str) -> bool:
    is_control = (ord(char) < 32 and char not in "\n\t") or ord(char) == 127
    return is_control or 0xD800 <= ord(char) <= 0xDFFF
