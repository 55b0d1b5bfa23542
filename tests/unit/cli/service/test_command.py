"""Service actions run the right systemctl or launchctl commands, and failed ones change nothing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.daemons import free_port
from vlm_server.cli.exit_codes import CommandFailed
from vlm_server.cli.main import build_parser, main
from vlm_server.cli.service import actions
from vlm_server.cli.service.launchd import Launchd
from vlm_server.cli.service.manager import ServiceManager, manager_for, run_command
from vlm_server.cli.service.systemd import SystemdUser
from vlm_server.errors import ConfigError, NotAvailable


class CommandRecorder:
    """Stands in for systemctl and launchctl: records commands, and answers with `codes` by verb.

    launchd still knows a service for `draining` calls of `print` after its `bootout`.
    """

    def __init__(self, draining: int = 0, **codes: int) -> None:
        self.codes = codes
        self.systemctl_output = (
            "ActiveState=active\nMainPID=7\nMemoryCurrent=1048576\nExecMainCode=0\n"
        )
        self.draining = draining
        self.commands: list[str] = []
        self._looks: int | None = None

    def __call__(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.commands.append(" ".join(words))
        code = next((code for verb, code in self.codes.items() if verb in words), 0)
        is_of_service = words[-1].count("/") > 1  # not of the domain that it is in
        code = code or (self._launchd(words[1]) if is_of_service else 0)
        out = (
            self.systemctl_output
            if words[0] == "systemctl"
            else "state = running\n\texit timeout = 40\n"
        )
        return subprocess.CompletedProcess(words, code, out, "it says no\n")

    def _launchd(self, verb: str) -> int:
        """The exit status of a launchctl command, as it follows from earlier commands."""
        if verb == "bootout":
            self._looks = self.draining
        elif verb == "print" and self._looks is not None:
            self._looks = max(-1, self._looks - 1)
            return 113 if self._looks < 0 else 0
        elif verb == "bootstrap" and self._looks is not None:
            if self._looks >= 0:
                return 5
            self._looks = None
        return 0


def install(manager: ServiceManager, *arguments: str) -> int:
    return act(manager, "install", "--no-wait", *arguments)


def act(manager: ServiceManager, *words: str) -> int:
    """Run an action; an install without a port or a file gets a free port."""
    command_words = list(words)
    if words[0] == "install" and not any("port" in word or "--config" in word for word in words):
        command_words += ["--set", f"server.port={free_port()}"]
    return actions.run(build_parser().parse_args(["service", *command_words]), manager)


def test_systemd_install_enables_and_starts_units(tmp_path: Path) -> None:
    run = CommandRecorder()
    manager = SystemdUser(tmp_path, run)
    assert install(manager) == 0
    assert manager.path == tmp_path / ".config/systemd/user/vlm-server.service"
    assert manager.path.is_file()
    units = "vlm-server.socket vlm-server.service"
    assert run.commands[-6:] == [
        "systemctl --user daemon-reload",
        f"systemctl --user enable {units}",
        f"systemctl --user stop {units}",
        f"systemctl --user reset-failed {units}",
        "systemctl --user start vlm-server.socket",
        "systemctl --user start vlm-server.service",
    ]


def test_systemd_reinstall_with_same_address_keeps_socket(tmp_path: Path) -> None:
    run = CommandRecorder()
    install(SystemdUser(tmp_path, run), "--set", "server.port=9000")
    del run.commands[:]
    install(SystemdUser(tmp_path, run), "--set", "server.port=9000", "--set", "log.level=debug")
    assert run.commands[-1] == "systemctl --user restart vlm-server.service"
    assert not any(" stop " in command for command in run.commands)


def test_launchd_install_reloads_plist(tmp_path: Path) -> None:
    run = CommandRecorder()
    manager = Launchd(tmp_path, run)
    assert install(manager) == 0
    assert manager.path == tmp_path / "Library/LaunchAgents/org.vlm-server.daemon.plist"
    assert (tmp_path / "Library/Logs").is_dir()
    bootout, enable, bootstrap = (command for command in run.commands if " print " not in command)
    for verb, command in {"bootout": bootout, "enable": enable}.items():
        assert command == f"launchctl {verb} gui/{os.getuid()}/org.vlm-server.daemon"
    assert bootstrap == f"launchctl bootstrap gui/{os.getuid()} {manager.path}"


def test_launchd_install_waits_until_old_service_drained(tmp_path: Path) -> None:
    """`bootout` returns at once, but loading fails until the old service is gone."""
    run, waited = CommandRecorder(draining=110), list[float]()
    assert install(Launchd(tmp_path, run, waited.append)) == 0
    assert 40 < sum(waited) < 100, "longer than it may take to stop"
    assert run.commands[-1].startswith("launchctl bootstrap")
    looks = [command for command in run.commands if " print " in command]
    assert len(looks) > 100


def test_launchd_restart_keeps_service_loaded(tmp_path: Path) -> None:
    """The service stays loaded; SIGTERM lets it finish its answers."""
    run = CommandRecorder()
    manager = Launchd(tmp_path, run, lambda _: None)
    install(manager)
    del run.commands[:]
    manager.restart()
    verbs = [command.split()[1] for command in run.commands if " print " not in command]
    assert verbs == ["kill", "kickstart"]


def test_launchd_install_gives_up_after_stop_timeout(tmp_path: Path) -> None:
    run, waited = CommandRecorder(draining=10_000), list[float]()
    with pytest.raises(CommandFailed, match="bootstrap"):
        install(Launchd(tmp_path, run, waited.append))
    assert sum(waited) < 2 * 160, "to stop the old one, and to remove the new one"


def test_systemd_install_ignores_reset_failed_error(tmp_path: Path) -> None:
    """`reset-failed` fails for a unit that has not failed, which is no error."""
    run = CommandRecorder(**{"reset-failed": 1})
    assert install(SystemdUser(tmp_path, run)) == 0
    assert run.commands[-1].endswith("start vlm-server.service")


def test_systemd_unit_path_honours_xdg_config_home(tmp_path: Path) -> None:
    def path(**environment: str) -> Path:
        return manager_for("linux", tmp_path, environment).path

    unit = "systemd/user/vlm-server.service"
    assert path() == path(XDG_CONFIG_HOME="relative") == tmp_path / ".config" / unit
    assert path(XDG_CONFIG_HOME="/etc/mine") == Path("/etc/mine") / unit


def test_service_install_refuses_api_keys(tmp_path: Path) -> None:
    manager = SystemdUser(tmp_path, CommandRecorder())
    with pytest.raises(ConfigError, match="settings file"):
        install(manager, "--set", 'server.api_keys=["a-long-enough-key"]')
    assert not manager.path.exists()


@pytest.mark.parametrize("kind", [Launchd, SystemdUser])
def test_installed_command_has_absolute_paths(
    kind: type[Launchd] | type[SystemdUser], tmp_path: Path
) -> None:
    config = tmp_path / "my settings.toml"
    config.write_text("[log]\nlevel = 'debug'\n")
    manager = kind(tmp_path, CommandRecorder())
    install(manager, "--config", str(config))
    program, *arguments = manager.read_words()
    assert program == str(Path(sys.executable).parent / "vlm-server")
    assert arguments[:3] == ["serve", "--config", str(config)]
    assert "--reload" in arguments


def test_service_file_is_private_and_replaced_atomically(tmp_path: Path) -> None:
    manager = SystemdUser(tmp_path, CommandRecorder())
    install(manager, "--set", "server.port=9000")
    install(manager, "--set", "server.port=9001")
    assert manager.path.stat().st_mode & 0o777 == 0o600
    assert "9001" in manager.path.read_text()
    assert {path.name for path in manager.path.parent.iterdir()} == {
        "vlm-server.service",
        "vlm-server.socket",
    }


def test_service_install_refuses_wrong_settings(tmp_path: Path) -> None:
    assert main(["service", "install", "--dry-run", "--set", "server.port=none"]) == 2


def test_service_dry_run_prints_file_without_installing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = CommandRecorder()
    manager = SystemdUser(tmp_path, run)
    assert install(manager, "--dry-run") == 0
    assert "[Service]" in capsys.readouterr().out
    assert not manager.path.exists()
    assert run.commands == []


def test_failed_manager_command_is_named_with_reason(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=r"(?s)enable vlm-server.*it says no"):
        install(SystemdUser(tmp_path, CommandRecorder(enable=1)))


def test_missing_manager_program_is_failure() -> None:
    result = run_command(["no-such-program-at-all"])
    assert result.returncode == 127
    assert "not installed" in result.stderr


@pytest.mark.parametrize("kind", [Launchd, SystemdUser])
def test_service_uninstall_is_idempotent(
    kind: type[Launchd] | type[SystemdUser], tmp_path: Path
) -> None:
    manager = kind(tmp_path, CommandRecorder())
    install(manager)
    assert act(manager, "uninstall") == 0
    assert list(manager.path.parent.iterdir()) == []
    assert act(manager, "uninstall") == 0


def test_failed_reinstall_restores_previous_files(tmp_path: Path) -> None:
    manager = SystemdUser(tmp_path, CommandRecorder())
    install(manager, "--set", "server.port=9000")
    before = [path.read_bytes() for path in manager.paths]
    broken = SystemdUser(tmp_path, CommandRecorder(start=1))
    with pytest.raises(CommandFailed, match="it says no"):
        install(broken, "--set", "server.port=9001")
    assert [path.read_bytes() for path in manager.paths] == before


def test_failed_first_install_removes_files(tmp_path: Path) -> None:
    manager = SystemdUser(tmp_path, CommandRecorder(start=1))
    with pytest.raises(CommandFailed, match=r"(?s)it says no.*Nothing was installed"):
        install(manager)
    assert list(manager.path.parent.iterdir()) == []


def test_interrupted_install_removes_files(tmp_path: Path) -> None:
    recorder = CommandRecorder()

    def run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        if "start" in words:
            raise KeyboardInterrupt
        return recorder(words)

    manager = SystemdUser(tmp_path, run)
    with pytest.raises(KeyboardInterrupt):
        install(manager)
    assert list(manager.path.parent.iterdir()) == []


def test_concurrent_service_install_is_refused(tmp_path: Path) -> None:
    manager = SystemdUser(tmp_path, CommandRecorder())
    with actions.lock(manager), pytest.raises(CommandFailed, match="is running"):
        install(manager)
    assert install(manager) == 0


def test_service_install_refuses_port_of_another_program(tmp_path: Path) -> None:
    """Otherwise the other program might answer in place of the service."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        run = CommandRecorder(**{"is-active": 3})
        manager = SystemdUser(tmp_path, run)
        with pytest.raises(NotAvailable, match="in use"):
            install(manager, "--set", f"server.port={port}")
        assert not manager.path.exists()
        install(manager, "--set", f"server.port={free_port()}")
        run.codes.clear()
        with pytest.raises(NotAvailable, match="in use"):
            install(manager, "--set", f"server.port={port}")


def test_service_install_refuses_port_zero(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="port"):
        install(SystemdUser(tmp_path, CommandRecorder()), "--set", "server.port=0")


@pytest.mark.parametrize("action", ["start", "stop", "restart"])
def test_service_action_fails_if_not_installed(action: str, tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="not installed"):
        act(SystemdUser(tmp_path, CommandRecorder()), action)


def test_service_restart_with_wrong_settings_keeps_service_running(tmp_path: Path) -> None:
    run, config = CommandRecorder(), tmp_path / "my.toml"
    config.touch()
    manager = SystemdUser(tmp_path, run)
    install(manager, "--config", str(config))
    config.write_text("[server]\nport = 'none'\n")
    del run.commands[:]
    with pytest.raises(ConfigError, match="port"):
        act(manager, "restart")
    assert run.commands == []


def test_service_install_fails_at_once_if_service_ended(tmp_path: Path) -> None:
    run = CommandRecorder()
    run.systemctl_output = "ActiveState=failed\nExecMainCode=1\nExecMainStatus=3\n"
    manager = SystemdUser(tmp_path, run)
    with pytest.raises(CommandFailed, match=r"it ended with 3 \(the model can't be loaded\)"):
        act(manager, "install")
    assert not manager.path.exists()


def test_service_status_reports_not_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert act(SystemdUser(tmp_path, CommandRecorder()), "status") == 4
    assert capsys.readouterr().out.startswith("not installed: 'vlm-server service install'")
    assert act(SystemdUser(tmp_path, CommandRecorder()), "status", "--json") == 4
    assert json.loads(capsys.readouterr().out) == {"state": "not installed"}


def test_service_status_reports_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = CommandRecorder()
    manager = SystemdUser(tmp_path, run)
    install(manager)
    run.systemctl_output = "ActiveState=inactive\nExecMainCode=1\nExecMainStatus=0\n"
    assert act(manager, "status") == 3
    assert "state      stopped" in capsys.readouterr().out


def test_service_status_queries_installed_port(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = SystemdUser(tmp_path, CommandRecorder())
    install(manager, "--set", "server.port=1")
    capsys.readouterr()
    assert act(manager, "status", "--json") == 1
    status_shown = json.loads(capsys.readouterr().out)
    assert status_shown["address"] == "http://127.0.0.1:1/v1"
    assert (status_shown["state"], status_shown["health"]) == ("running", "no answer")
    assert (status_shown["pid"], status_shown["memory_bytes"]) == (7, 1 << 20)


def test_service_status_shows_address_changed_in_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "my.toml"
    config.write_text("[server]\nport = 9000\n")
    manager = SystemdUser(tmp_path, CommandRecorder())
    install(manager, "--config", str(config), "--set", "log.level=info")
    config.write_text("[server]\nport = 9001\n")
    act(manager, "status")
    status_shown = capsys.readouterr().out
    assert "http://127.0.0.1:9000/v1" in status_shown
    assert "127.0.0.1:9001" in status_shown


def test_launchd_state_is_parsed_from_print_and_ps(tmp_path: Path) -> None:
    """As `launchctl print` and `ps` write it; no Mac has been asked yet."""

    def run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        outputs = {
            "launchctl": "x = {\n\tstate = running\n\tpid = 70\n\tlast exit code = 75\n}\n",
            "-o": "Sun Nov 22 20:00:00 2026\n",
            "-axo": "1 0 99\n71 70 10\n70 1 1024\n69 71 3\n",
        }
        key = words[0] if words[0] == "launchctl" else words[1]
        return subprocess.CompletedProcess(words, 0, outputs[key], "")

    state = Launchd(tmp_path, run).state()
    assert (state.state, state.pid) == ("running", 70)
    assert state.memory_bytes == (1024 + 10 + 3) << 10, "with what it started"
    assert state.since == "Sun Nov 22 20:00:00 2026"
    assert state.last_exit is not None
    assert state.last_exit.startswith("75 ")


def test_service_log_command_follows_manager(tmp_path: Path) -> None:
    systemd, launchd = SystemdUser(tmp_path), Launchd(tmp_path)
    assert systemd.log_command(9, follow=True)[-1] == "--follow"
    assert "vlm-server.service" in systemd.log_command(9, follow=False)
    path = str(tmp_path / "Library/Logs/vlm-server.log")
    assert launchd.log_command(9, follow=True) == ["tail", "-n", "9", "-F", path]
