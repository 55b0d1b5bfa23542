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
from vlm_server.cli.serving.listener import BACKLOG

LABEL = "org.vlm-server.daemon"
UNIT = "vlm-server.service"
SOCKET_UNIT = "vlm-server.socket"

_RESTART_PAUSE_SECONDS = 10
_MAX_FILES = 16_384
"""Open files and connections: many systems allow 1,024, macOS 256."""
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "%": "%%"}
_UNESCAPES = {"n": "\n", "t": "\t"}
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_STOP_MARGIN_SECONDS = 25
_LAUNCHD_SOCKET = "http"
_GIVE_UP_QUIETLY = ["--give-up-status", "0"]


@dataclass(frozen=True, slots=True)
class ServiceCommand:
    """What a service runs: a program, its arguments, the address at which its manager listens for
    it, an IP address, and the time it takes to drain.

    Raises CommandFailed for words that the files can't hold: with control characters, or bytes that
    are not UTF-8.
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
        """Longer than the last requests, draining, slow readers and the engine's exit take."""
        return math.ceil(self.drain_seconds) + _STOP_MARGIN_SECONDS


def launchd_plist(command: ServiceCommand, log: Path, *, has_screen: bool = True) -> bytes:
    """A LaunchAgent: started at login, restarted after a crash but not after `exit 0`.

    Unless whoever installs it `has_screen`, a login by SSH starts it, too.

    launchd tells no other statuses apart, so the daemon gives up with that. It listens for the
    daemon, also while that restarts. What is written before the daemon takes the log over goes
    to the same file.
    """
    own = [*_GIVE_UP_QUIETLY, "--log-file", str(log), "--launchd-socket", _LAUNCHD_SOCKET]
    return plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": [*command.words, *own],
            "Sockets": {
                _LAUNCHD_SOCKET: {
                    "SockNodeName": command.host,
                    "SockServiceName": str(command.port),
                    "SockFamily": "IPv6" if ":" in command.host else "IPv4",
                    "SockType": "stream",
                }
            },
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": _RESTART_PAUSE_SECONDS,
            "ExitTimeOut": command.stop_seconds,
            "ProcessType": "Interactive",  # otherwise macOS throttles it
            "StandardOutPath": str(log),
            "StandardErrorPath": str(log),
            "Umask": 0o077,
            "SoftResourceLimits": {"NumberOfFiles": _MAX_FILES},
            **({} if has_screen else {"LimitLoadToSessionType": ["Aqua", "Background"]}),
        }
    )


def words_of_plist(text: bytes) -> list[str]:
    """The program and arguments in a file made by `launchd_plist`."""
    return [str(word) for word in plistlib.loads(text)["ProgramArguments"]]


def address_of_plist(text: bytes) -> str:
    """The address in a file made by `launchd_plist`."""
    listener = plistlib.loads(text)["Sockets"][_LAUNCHD_SOCKET]
    return _joined(listener["SockNodeName"], listener["SockServiceName"])


def systemd_socket(command: ServiceCommand) -> bytes:
    """A user unit that listens for the daemon, and goes on doing so while it restarts."""
    return f"""\
[Unit]
Description=Address of the vision-language model server

[Socket]
ListenStream={_joined(command.host, command.port)}
Backlog={BACKLOG}

[Install]
WantedBy=sockets.target
""".encode()


def address_of_socket(text: bytes) -> str:
    """The address in a file made by `systemd_socket`."""
    found = re.search(rb"^ListenStream=(.+)$", text, re.MULTILINE)
    return found[1].decode() if found else ""


def systemd_unit(command: ServiceCommand) -> bytes:
    """A user unit: restarted after a crash, and until what it waits for is there.

    Not restarted after the exit codes that mean that a restart would not help: then nobody listens
    any more either, since the next client would have it started. Where systemd can't listen, the
    daemon tries that itself. The kernel may kill the engine for want of memory: the front starts
    another, so systemd goes on. The sandboxing options are those that an unprivileged manager can
    apply.
    """
    program, *arguments = command.words
    # systemd expands variables in arguments, but not in the path of the program.
    quoted = [_quote(program), *(_quote(word).replace("$", "$$") for word in arguments)]
    final = "|".join(map(str, exit_codes.FINAL))
    stop_listening = f"exec systemctl --user --no-block stop {SOCKET_UNIT}"
    return f"""\
[Unit]
Description=Vision-language model server
StartLimitIntervalSec=0
Wants={SOCKET_UNIT}
After={SOCKET_UNIT}

[Service]
Type=exec
ExecStart={" ".join(quoted)}
ExecReload=/bin/kill -HUP $MAINPID
ExecStopPost=/bin/sh -c 'case $$EXIT_STATUS in {final}) {stop_listening} ;; esac'
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


def _joined(host: str, port: int | str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
