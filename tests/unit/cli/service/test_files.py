"""Service files configure launchd and systemd correctly, for paths with any characters."""

from __future__ import annotations

import configparser
import plistlib
import shutil
import subprocess
from pathlib import Path

import pytest

from vlm_server.cli import exit_codes
from vlm_server.cli.exit_codes import CommandFailed
from vlm_server.cli.service import launchd, systemd
from vlm_server.cli.service.actions import write
from vlm_server.cli.service.manager import ServiceCommand, ServiceManager

AWKWARD = [
    "serve",
    *("--config", '/home/a user/50% of $HOME/set "tings".toml'),
    *("--set", 'model.name="back\\slash"'),
    *("--set", "model.path=two\nlines\tand a tab; # ${HOME} 'single' %h \u00fc\u2028"),
]
PROGRAM = Path("/opt/my $programs 100%/.venv/bin/vlm-server")


def command(arguments: list[str] | None = None, drain_seconds: float = 20.0) -> ServiceCommand:
    return ServiceCommand(PROGRAM, arguments or ["serve"], "127.0.0.1", 8000, drain_seconds)


def unit_of(text: bytes) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text.decode())
    return parser


def test_plist_starts_daemon_at_login() -> None:
    plist = plistlib.loads(launchd.launchd_plist(command(AWKWARD), Path("/logs/x.log")))
    assert plist["Label"] == launchd.LABEL
    own = ["--give-up-status", "0", "--log-file", "/logs/x.log", "--launchd-socket", "http"]
    assert plist["ProgramArguments"] == [str(PROGRAM), *AWKWARD, *own]
    assert list(plist["Sockets"]) == ["http"]
    assert plist["RunAtLoad"] is True


def test_plist_restarts_after_crash_with_delay() -> None:
    plist = plistlib.loads(launchd.launchd_plist(command(), Path("/logs/x.log")))
    assert plist["KeepAlive"] == {"SuccessfulExit": False}
    assert plist["ThrottleInterval"] == 10


def test_plist_keeps_logs_private() -> None:
    plist = plistlib.loads(launchd.launchd_plist(command(), Path("/logs/x.log")))
    assert plist["StandardOutPath"] == plist["StandardErrorPath"] == "/logs/x.log"
    assert plist["Umask"] == 0o077


def test_systemd_unit_starts_daemon_at_login() -> None:
    unit = unit_of(systemd.systemd_unit(command()))
    path = "/opt/my $programs 100%%/.venv/bin/vlm-server"  # no variable is expanded in a path
    assert unit["Service"]["ExecStart"] == f'"{path}" "serve"'
    assert unit["Install"]["WantedBy"] == "default.target"


def test_systemd_unit_restarts_without_limit_except_final_codes() -> None:
    """A disk may be mounted, or a port be free, hours later: there is no limit to the restarts."""
    unit = unit_of(systemd.systemd_unit(command()))
    assert unit["Service"]["Restart"] == "on-failure"
    assert unit["Service"]["RestartPreventExitStatus"] == "2 3"
    assert str(exit_codes.NOT_AVAILABLE) not in unit["Service"]["RestartPreventExitStatus"]
    assert int(unit["Service"]["RestartSec"]) >= 5
    assert unit["Unit"]["StartLimitIntervalSec"] == "0"


def test_systemd_unit_continues_after_oom_kill_of_engine() -> None:
    assert unit_of(systemd.systemd_unit(command()))["Service"]["OOMPolicy"] == "continue"


def test_service_files_allow_many_open_files() -> None:
    unit = unit_of(systemd.systemd_unit(command()))
    plist = plistlib.loads(launchd.launchd_plist(command(), Path("/logs/x.log")))
    assert int(unit["Service"]["LimitNOFILE"]) >= 8192
    assert plist["SoftResourceLimits"]["NumberOfFiles"] >= 8192


@pytest.mark.parametrize("word", ["a\0b", "a\rb", "bell\a", "not utf-8 \udcff", "\x7f"])
def test_service_command_refuses_control_characters(word: str) -> None:
    with pytest.raises(CommandFailed, match="can't hold"):
        command(["serve", "--model", word])
    with pytest.raises(CommandFailed, match="can't hold"):
        ServiceCommand(Path("/two\nlines/vlm-server"), ["serve"], "::1", 1, 20.0)


def test_systemd_unit_signals_only_front_process() -> None:
    unit = unit_of(systemd.systemd_unit(command()))
    assert unit["Service"]["KillMode"] == "mixed"
    assert unit["Service"]["NoNewPrivileges"] == "yes"


@pytest.mark.parametrize("drain_seconds", [0.0, 0.5, 20.0, 600.0])
def test_service_stop_timeout_exceeds_drain_time(drain_seconds: float) -> None:
    service_command = command(drain_seconds=drain_seconds)
    plist = plistlib.loads(launchd.launchd_plist(service_command, Path("/logs/x.log")))
    unit = unit_of(systemd.systemd_unit(service_command))
    assert plist["ExitTimeOut"] > drain_seconds + 5
    assert int(unit["Service"]["TimeoutStopSec"]) > drain_seconds + 5


def test_systemd_unit_escapes_expansions() -> None:
    line = unit_of(systemd.systemd_unit(command(AWKWARD)))["Service"]["ExecStart"]
    assert "50%% of $$HOME" in line
    assert '\\"tings\\"' in line
    assert "back\\\\slash" in line


@pytest.fixture(params=[launchd.Launchd, systemd.SystemdUser])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> ServiceManager:
    service_manager: ServiceManager = request.param(
        tmp_path, lambda words: subprocess.CompletedProcess(words, 0, "", "")
    )
    return service_manager


def test_service_command_line_round_trips_through_file(manager: ServiceManager) -> None:
    words = [str(PROGRAM), *AWKWARD]
    write(manager.render(command(AWKWARD)))
    assert manager.read_words()[: len(words)] == words


@pytest.mark.parametrize(
    ("host", "address"), [("127.0.0.1", "127.0.0.1:8000"), ("::1", "[::1]:8000")]
)
def test_service_address_round_trips_through_file(
    manager: ServiceManager, host: str, address: str
) -> None:
    write(manager.render(ServiceCommand(PROGRAM, ["serve"], host, 8000, 20.0)))
    assert manager.read_address() == address


def test_plist_socket_has_configured_address() -> None:
    service_command = ServiceCommand(PROGRAM, ["serve"], "::1", 8000, 20.0)
    listener = plistlib.loads(launchd.launchd_plist(service_command, Path("/x.log")))["Sockets"][
        "http"
    ]
    assert listener["SockNodeName"] == "::1"
    assert listener["SockServiceName"] == "8000"
    assert listener["SockFamily"] == "IPv6"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_analyze_accepts_units(tmp_path: Path) -> None:
    program = tmp_path / "a $HOME program 100%" / "vlm-server"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    service_command = ServiceCommand(program, AWKWARD, "::1", 8000, 20.0)
    paths = (tmp_path / systemd.UNIT, tmp_path / systemd.SOCKET_UNIT)
    paths[0].write_bytes(systemd.systemd_unit(service_command))
    paths[1].write_bytes(systemd.systemd_socket(service_command))
    result = subprocess.run(
        ["systemd-analyze", "--user", "verify", *map(str, paths)],
        capture_output=True,
        text=True,
        check=False,
        env={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
    )
    complaints = [line for line in result.stderr.splitlines() if "vlm-server." in line]
    assert complaints == []
