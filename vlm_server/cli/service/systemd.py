"""The service as units of the user's systemd manager: one runs it, one listens for it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vlm_server.cli import exit_codes
from vlm_server.cli.serve.listener import BACKLOG
from vlm_server.cli.service.manager import (
    MAX_FILES,
    RESTART_PAUSE_SECONDS,
    Files,
    RunCommand,
    ServiceCommand,
    ServiceManager,
    ServicePhase,
    ServiceState,
    exit_text,
    join_address,
    run_command,
)

UNIT = "vlm-server.service"
SOCKET_UNIT = "vlm-server.socket"
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "%": "%%"}
_UNESCAPES = {"n": "\n", "t": "\t"}
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_STATES: dict[str, ServicePhase] = {
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
"""Values of `ExecMainCode`: CLD_EXITED, and a running process."""


@dataclass(frozen=True, slots=True)
class SystemdUser(ServiceManager):
    """The units of the user's systemd manager; `config_home` replaces `~/.config`."""

    home: Path
    run: RunCommand = run_command
    config_home: Path | None = None

    @property
    def paths(self) -> Sequence[Path]:
        folder = (self.config_home or self.home / ".config") / "systemd" / "user"
        return (folder / UNIT, folder / SOCKET_UNIT)

    @property
    def log(self) -> str:
        return f"journalctl --user-unit {UNIT}"

    def render(self, command: ServiceCommand) -> Files:
        unit, socket_unit = self.paths
        return {unit: systemd_unit(command), socket_unit: systemd_socket(command)}

    def read_words(self) -> list[str]:
        for line in self.path.read_bytes().decode().split("\n"):
            if line.startswith("ExecStart="):
                program, *arguments = map(_unquote, _QUOTED.findall(line))
                return [program, *(word.replace("$$", "$") for word in arguments)]
        return []

    def read_address(self) -> str:
        path = self.paths[1]
        text = path.read_bytes().decode() if path.exists() else ""
        match = re.search(r"^ListenStream=(.+)$", text, re.MULTILINE)
        return match[1] if match else ""

    def load(self, *, is_moved: bool) -> None:
        self._check("daemon-reload")
        self._check("enable", *self._units)
        if is_moved:  # a socket can't be replaced while its service runs
            self.stop()
            self.start()
        else:
            self.restart()

    def unload(self) -> None:
        self._run("disable", "--now", *self._units)

    def forget(self) -> None:
        self._run("daemon-reload")

    def start(self) -> None:
        # Needed after too many failures, harmless otherwise.
        self._run("reset-failed", *self._units)
        for unit in self._units:
            self._check("start", unit)

    def stop(self) -> None:
        self._check("stop", *self._units)

    def restart(self) -> None:
        if not self.is_running():
            self.start()
            return
        if SOCKET_UNIT in self._units:  # inactive if the service listens by itself
            self._run("start", SOCKET_UNIT)
        self._check("restart", UNIT)

    def is_running(self) -> bool:
        return self._run("is-active", "--quiet", UNIT).returncode == 0

    def is_listening(self) -> bool:
        return any(self._run("is-active", "--quiet", unit).returncode == 0 for unit in self._units)

    def state(self) -> ServiceState:
        words = [word for name in _PROPERTIES for word in ("--property", name)]
        lines = self._run("show", UNIT, *words).stdout.splitlines()
        properties = dict(line.split("=", 1) for line in lines if "=" in line)
        pid, memory = properties.get("MainPID", ""), properties.get("MemoryCurrent", "")
        state = _STATES.get(properties.get("ActiveState", ""), "stopped")
        if properties.get("SubState") == "auto-restart":
            state = "restarting"
        return ServiceState(
            state=state,
            pid=int(pid) if pid.isdecimal() and pid != "0" else None,
            since=properties.get("ActiveEnterTimestamp") or None,
            memory_bytes=int(memory) if memory.isdecimal() and len(memory) < 19 else None,
            last_exit=_last_exit(properties),
        )

    def log_command(self, lines: int, *, follow: bool) -> list[str]:
        command = ["journalctl", "--user-unit", UNIT, "--lines", str(lines), "--no-pager"]
        return [*command, "--output", "cat", *(["--follow"] if follow else [])]

    @property
    def _units(self) -> list[str]:
        """Installed units, the socket first; earlier versions had none."""
        return [path.name for path in reversed(self.paths) if path.exists()] or [UNIT]

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run(("systemctl", "--user", *words))

    def _check(self, *words: str) -> None:
        self.check("systemctl", "--user", *words)


def _last_exit(properties: dict[str, str]) -> str | None:
    """The end of the last process, or the number of restarts."""
    code, status = properties.get("ExecMainCode", _RUNNING), properties.get("ExecMainStatus", "")
    if code == _EXITED and status.isdecimal():
        return exit_text(int(status))
    if code != _RUNNING:
        return f"ended by signal {status}"
    count = properties.get("NRestarts", "0")
    return f"started again {count} times after a crash" if count not in ("0", "") else None


def systemd_socket(command: ServiceCommand) -> bytes:
    """A user unit that listens for the daemon, also while it restarts."""
    return f"""\
[Unit]
Description=Address of the vision-language model server

[Socket]
ListenStream={join_address(command.host, command.port)}
Backlog={BACKLOG}

[Install]
WantedBy=sockets.target
""".encode()


def systemd_unit(command: ServiceCommand) -> bytes:
    """User unit: restarted after a crash, and until its resources are available.

    It is not restarted where that would not help: then the socket is closed, too, since the next
    client would start it. If the kernel kills the engine for lack of memory, the front starts
    another, so systemd does not stop the unit. The sandboxing options are those that an
    unprivileged manager can apply.
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
RestartSec={RESTART_PAUSE_SECONDS}
RestartPreventExitStatus={" ".join(map(str, exit_codes.FINAL))}
OOMPolicy=continue
LimitNOFILE={MAX_FILES}
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


def _quote(word: str) -> str:
    """`word` quoted for ExecStart, with all escaped but `$`."""
    return '"' + "".join(_ESCAPES.get(char, char) for char in word) + '"'


def _unquote(text: str) -> str:
    """The reverse of `_quote`, of what is between the quotes."""
    plain = re.sub(r"\\(.)", lambda match: _UNESCAPES.get(match[1], match[1]), text)
    return plain.replace("%%", "%")
