"""Installing, removing and looking at the service, with the system's commands recorded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from vlm_server.cli.failure import CommandFailed
from vlm_server.cli.main import build_parser, main
from vlm_server.cli.service import command as service
from vlm_server.cli.service.manager import (
    Launchd,
    ServiceManager,
    SystemdUser,
    manager_for,
    run_command,
)
from vlm_server.errors import ConfigError


class Recorder:
    """Stands in for the system: notes each command, and answers with `codes` by its verb.

    launchd knows a service after `bootout` for as many looks as `draining` says.
    """

    def __init__(self, draining: int = 0, **codes: int) -> None:
        self.codes = codes
        self.draining = draining
        self.commands: list[str] = []
        self._looks: int | None = None

    def __call__(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.commands.append(" ".join(words))
        code = next((code for verb, code in self.codes.items() if verb in words), 0)
        code = code or self._launchd(words[1] if len(words) > 1 else "")
        out = "state = running\n\texit timeout = 40\n"
        return subprocess.CompletedProcess(words, code, out, "it says no\n")

    def _launchd(self, verb: str) -> int:
        """The status of a command of launchctl, as far as it follows from those before."""
        if verb == "bootout":
            self._looks = self.draining
        elif verb == "print" and self._looks is not None:
            self._looks -= 1
            return 113 if self._looks < 0 else 0
        elif verb == "bootstrap" and self._looks is not None:
            if self._looks >= 0:
                return 5
            self._looks = None
        return 0


def install(manager: ServiceManager, *arguments: str) -> int:
    options = build_parser().parse_args(["service", "install", *arguments])
    return service.install(options, manager)


def test_systemd_is_told_of_the_file_and_starts_it(tmp_path: Path) -> None:
    run = Recorder()
    manager = SystemdUser(tmp_path, run)
    assert install(manager) == 0
    assert manager.path == tmp_path / ".config/systemd/user/vlm-server.service"
    assert manager.path.is_file()
    assert run.commands == [
        "systemctl --user daemon-reload",
        "systemctl --user enable vlm-server.service",
        "systemctl --user reset-failed vlm-server.service",
        "systemctl --user restart vlm-server.service",
    ]


def test_launchd_forgets_the_old_file_and_loads_the_new(tmp_path: Path) -> None:
    run = Recorder()
    manager = Launchd(tmp_path, run)
    assert install(manager) == 0
    assert manager.path == tmp_path / "Library/LaunchAgents/org.vlm-server.daemon.plist"
    assert (tmp_path / "Library/Logs").is_dir()
    bootout, look, bootstrap = run.commands
    assert look.startswith("launchctl print gui/")
    assert bootout.endswith("/org.vlm-server.daemon")
    assert bootstrap.startswith("launchctl bootstrap gui/")
    assert bootstrap.endswith(str(manager.path))


def test_launchd_waits_for_the_old_one_to_finish_its_answers(tmp_path: Path) -> None:
    """`bootout` returns at once; nothing can be loaded before the old one is gone."""
    run, waited = Recorder(draining=110), list[float]()
    assert install(Launchd(tmp_path, run, waited.append)) == 0
    assert 40 < sum(waited) < 100, "longer than it may take to stop"
    assert run.commands[-1].startswith("launchctl bootstrap")
    assert run.commands[-2].startswith("launchctl print")


def test_launchd_is_asked_no_longer_than_it_may_take(tmp_path: Path) -> None:
    run, waited = Recorder(draining=10_000), list[float]()
    with pytest.raises(CommandFailed, match="bootstrap"):
        install(Launchd(tmp_path, run, waited.append))
    assert sum(waited) < 150


def test_a_unit_that_failed_too_often_is_started(tmp_path: Path) -> None:
    """`reset-failed` says no for one that has not failed: that is no error."""
    run = Recorder(**{"reset-failed": 1})
    assert install(SystemdUser(tmp_path, run)) == 0
    assert run.commands[-1].endswith("restart vlm-server.service")


def test_the_unit_goes_where_the_user_keeps_configuration(tmp_path: Path) -> None:
    def path(**environment: str) -> Path:
        return manager_for("linux", tmp_path, environment).path

    unit = "systemd/user/vlm-server.service"
    assert path() == path(XDG_CONFIG_HOME="relative") == tmp_path / ".config" / unit
    assert path(XDG_CONFIG_HOME="/etc/mine") == Path("/etc/mine") / unit


def test_keys_are_not_installed(tmp_path: Path) -> None:
    manager = SystemdUser(tmp_path, Recorder())
    with pytest.raises(ConfigError, match="settings file"):
        install(manager, "--set", 'server.api_keys=["a-long-enough-key"]')
    assert not manager.path.exists()


@pytest.mark.parametrize("kind", [Launchd, SystemdUser])
def test_the_installed_command_is_absolute(
    kind: type[Launchd] | type[SystemdUser], tmp_path: Path
) -> None:
    config = tmp_path / "my settings.toml"
    config.write_text("[server]\nport = 9000\n")
    manager = kind(tmp_path, Recorder())
    install(manager, "--config", str(config))
    program, *arguments = manager.read_words()
    assert program == str(Path(sys.executable).parent / "vlm-server")
    assert arguments == ["serve", "--config", str(config)]


def test_the_file_is_its_owners_alone_and_replaced_whole(tmp_path: Path) -> None:
    manager = SystemdUser(tmp_path, Recorder())
    install(manager, "--set", "server.port=9000")
    install(manager, "--set", "server.port=9001")
    assert manager.path.stat().st_mode & 0o777 == 0o600
    assert "9001" in manager.path.read_text()
    assert [path.name for path in manager.path.parent.iterdir()] == [manager.path.name]


def test_wrong_settings_install_nothing(tmp_path: Path) -> None:
    assert main(["service", "install", "--dry-run", "--set", "server.port=none"]) == 2


def test_a_dry_run_prints_the_file_and_touches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Recorder()
    manager = SystemdUser(tmp_path, run)
    assert install(manager, "--dry-run") == 0
    assert "[Service]" in capsys.readouterr().out
    assert not manager.path.exists()
    assert run.commands == []


def test_a_command_that_fails_is_named_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=r"(?s)enable vlm-server.*it says no"):
        install(SystemdUser(tmp_path, Recorder(enable=1)))


def test_a_missing_program_is_a_failure_too() -> None:
    result = run_command(["no-such-program-at-all"])
    assert result.returncode == 127
    assert "not installed" in result.stderr


@pytest.mark.parametrize("kind", [Launchd, SystemdUser])
def test_uninstalling_twice_does_no_harm(
    kind: type[Launchd] | type[SystemdUser], tmp_path: Path
) -> None:
    manager = kind(tmp_path, Recorder())
    install(manager)
    assert service.uninstall(manager) == 0
    assert not manager.path.exists()
    assert service.uninstall(manager) == 0


def test_the_status_of_what_is_not_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert service.status(SystemdUser(tmp_path, Recorder())) == 1
    assert capsys.readouterr().out == "not installed\n"


def test_the_status_of_what_does_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = SystemdUser(tmp_path, Recorder(**{"is-active": 3}))
    install(manager)
    assert service.status(manager) == 1
    assert capsys.readouterr().out.endswith("not running\n")


def test_the_status_asks_the_port_that_was_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = Launchd(tmp_path, Recorder())
    install(manager, "--set", "server.port=1")
    assert service.status(manager) == 1
    assert "not ready yet: http://127.0.0.1:1/v1" in capsys.readouterr().out
