"""The command line gives exit codes and one-line errors, and passes settings on unchanged."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from shutil import copytree

import pytest
from huggingface_hub import constants

from vlm_server.cli.main import build_parser, main
from vlm_server.cli.options import load_settings, settings_arguments
from vlm_server.errors import ConfigError
from vlm_server.models import EMBEDDED


def test_main_without_command_shows_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([])
    assert exit_info.value.code == 2
    assert "usage: vlm-server" in capsys.readouterr().err


def test_check_config_accepts_valid_settings_and_names_default_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "vlm-server/config.toml"
    given = "command line\n  server.port = 9000  (default 8000)\n"
    for state in ("not there", "read"):
        assert main(["check-config", "--set", "server.port=9000"]) == 0
        shown = f"{given}Default file: {file} ({state})\nThe settings are valid.\n"
        assert capsys.readouterr().out == shown
        file.parent.mkdir(exist_ok=True)
        file.touch()
    assert main(["check-config", "--config", str(file)]) == 0
    assert capsys.readouterr().out == "The settings are valid.\n"


def test_check_config_names_unknown_setting_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", "--set", "server.prot=9000"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("vlm-server: ")
    assert "prot" in captured.err
    assert captured.err.count("\n") == 1


def test_check_config_names_all_faults_of_file_with_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "settings.toml"
    faults = {
        'server.host = "::"': "`server.host` '::' can be reached",
        "[sever]": "there is no section `sever`: did you mean `server`?",
        "a = 1": "",
        "[model]": "",
        'chat_template = "absent"': "`model.chat_template`: there is no file",
        "keep_alive_seconds = 3": "`model.keep_alive_seconds` has no effect on a pinned model",
        'dtype = "float61"': "did you mean float16?",
        '["models"."org/x"]': "`models.org/x.path` is missing",
        "[cache] # mine": "",
        "max_disk_byte = 0": "did you mean `cache.max_disk_bytes`?",
        "max_pixel_bytes = -1": "of at least 0, or `auto`",
        "kv_bits = true": "`cache.kv_bits`: it may be 16, 8, 4 or auto",
        'disk_folder = "here"': "`cache.disk_folder` 'here' is not absolute",
        "[log]": "",
        "level = 3": "`log.level`: it may be debug, info, warning or error",
    }
    config.write_text("\n".join(faults))
    assert main(["check-config", "--config", str(config)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    named = {line.removeprefix("vlm-server: ") for line in err.splitlines()}
    wanted = {number: text for number, text in enumerate(faults.values(), 1) if text}
    assert len(named) == len(wanted), err
    for number, text in wanted.items():
        start = f"{config}, line {number}: "
        assert any(line.startswith(start) and text in line for line in named), (start, text, err)


def test_settings_file_may_be_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `sops exec-file` gives it: its text can be read once."""
    os.mkfifo(pipe := tmp_path / "settings.toml")
    words = [
        "sh",
        "-c",
        'echo "$1" > "$0"',
        str(pipe),
        '[model]\npath = "./absent"\n[server]\na = 1',
    ]
    with subprocess.Popen(words):
        assert main(["check-config", "--config", str(pipe)]) == 2
    err = capsys.readouterr().err
    assert f"warning: {pipe}, line 2: `model.path`" in err
    assert f"{pipe}, line 4: there is no setting `server.a`" in err


def test_check_config_warns_of_limits_above_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "settings.toml"
    config.write_text(
        '[memory]\nmax_bytes = "900 TiB"\n'
        '[cache]\nmax_pixel_bytes = "900 TiB"\nmax_grammar_bytes = "1 MiB"\n'
        f'max_disk_bytes = "900 TB"\ndisk_folder = "{tmp_path}/cache"\n'
        '[files]\nmax_bytes = "900 TB"\n'
    )
    assert main(["check-config", "--config", str(config)]) == 0
    disk, *memory = capsys.readouterr().err.splitlines()
    start = f"warning: {config}, line"
    assert disk.startswith(f"{start} 6: `cache.max_disk_bytes`: {tmp_path}/cache, ")
    assert " free, less than 900 TB: free some, or set cache.max_disk_bytes" in disk
    assert [line.partition(" is more than")[0] for line in memory] == [
        f"{start} 4: `cache.max_pixel_bytes`: 900 TiB",
        f"{start} 2: `memory.max_bytes`: 900 TiB",
    ]
    share = ("memory.max_bytes=75%", "cache.max_disk_bytes=1MB", "cache.max_pixel_bytes=1MiB")
    assert main(["check-config", *(word for one in share for word in ("--set", one))]) == 0
    assert capsys.readouterr().err == ""


def test_check_config_says_nothing_of_device_that_cannot_be_examined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 580.1\n")
    driver.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx/__init__.py").write_text("raise ImportError('no driver')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main(["check-config", "--set", "memory.max_bytes=900TiB"]) == 0
    assert "bounds nothing" not in capsys.readouterr().err


def test_check_config_warns_of_models_that_are_not_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / f"hub/models--org--Qwen-Tiny/snapshots/{'a' * 40}"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    config = tmp_path / "settings.toml"
    config.write_text('[model]\npath = "org/other"\n[models.a]\npath = "./absent"\n'
                      '[models.b]\npath = "org/Qwen-Tny"\n')  # fmt: skip
    assert main(["check-config", "--config", str(config)]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("The settings are valid.\n")
    lines = sorted(err.splitlines())
    wanted = ("org/other is not on this machine, and is downloaded", f"{tmp_path}/absent is not",
              "org/Qwen-Tny is not on this machine: did you mean org/Qwen-Tiny?")  # fmt: skip
    for line, number, text in zip(lines, (2, 4, 6), wanted, strict=True):
        assert line.startswith(f"warning: {config}, line {number}: `model")
        assert text in line


def test_printed_defaults_are_valid_toml(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", "--print-defaults"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["server"]["port"] == 8000


@pytest.mark.parametrize("command", ["serve", "check-config", "ask picture.png what"])
def test_commands_refuse_exposed_host_without_keys(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--set", "server.host=0.0.0.0"]) == 2
    assert "server.api_keys" in capsys.readouterr().err


def test_serve_reports_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 75
    error = capsys.readouterr().err
    assert f"can't listen on 127.0.0.1:{port}: " in error
    assert f"(process {os.getpid()}, " in error
    assert "choose another port with --port" in error


def test_serve_reports_unavailable_address(capsys: pytest.CaptureFixture[str]) -> None:
    keys = 'server.api_keys=["a-long-enough-key"]'
    assert main(["serve", "--host", "192.0.2.1", "--set", keys]) == 75
    assert "can't listen on 192.0.2.1" in capsys.readouterr().err


def test_options_override_set_and_set_overrides_file(tmp_path: Path) -> None:
    config = tmp_path / "settings.toml"
    config.write_text('[server]\nport = 1\n[model]\npath = "x"\nname = "n"\n')
    folder = tmp_path / "a b" / "ü"
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    arguments = ["serve", "--config", str(config), "--model", str(folder), "--port", "3"]
    arguments += ["--set", "server.port=2", "--set", "model.path=y"]
    options = build_parser().parse_args(arguments)
    settings = load_settings(options)
    assert settings.server.port == 3
    assert settings.model.path == str(folder)
    assert settings.model.name == "n"


def test_settings_arguments_have_absolute_paths(tmp_path: Path) -> None:
    options = build_parser().parse_args(
        ["serve", "--config", "c.toml", "--model", str(tmp_path), "--set", "log.level=debug"]
    )
    assert settings_arguments(options) == [
        *("--config", str(Path.cwd() / "c.toml")),
        *("--model", str(tmp_path)),
        *("--set", "log.level=debug"),
    ]


@pytest.mark.parametrize("command", ["serve", "check-config", "service install --dry-run"])
def test_commands_refuse_folder_without_config_json(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "letter.txt").touch()
    assert main([*command.split(), "--set", f"model.path={tmp_path}"]) == 2
    assert (
        f"`model.path`: {tmp_path} is no checkpoint: it has no config.json"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("command", ["serve", "check-config", "service install --dry-run"])
def test_commands_refuse_memory_limit_below_weights(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The embedded model takes 15 MB, which is found without starting an engine."""
    assert main([*command.split(), "--set", "memory.max_bytes=11MB"]) == 3
    assert "take 15 MB in their files, and 10 MiB are allowed" in capsys.readouterr().err
    folder = copytree(EMBEDDED, tmp_path / "model")
    settings = (
        *("memory.max_bytes=11MB", "model.dtype=float16"),
        *(f"models.it.path={folder}", "models.it.pinned=true"),
    )
    assert (
        main([*command.split(), *(word for setting in settings for word in ("--set", setting))])
        == 3
    )
    assert f"those of {folder} take 15 MB" in capsys.readouterr().err


def test_check_config_names_gguf_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model-Q4_K_M.gguf").touch()
    assert main(["check-config", "--model", str(tmp_path)]) == 2
    assert "GGUF" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "service install --dry-run"])
def test_unmounted_disk_exits_with_not_available(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty folder is what a mount point is without its disk."""
    disk = "/media/vlm-server-absent"
    for words in (["--model", str(tmp_path)], ["--model", disk], ["--config", f"{disk}/x.toml"]):
        assert main([*command.split(), *words]) == 75
        assert "is its disk mounted?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "service install --dry-run"])
def test_mistyped_path_exits_with_wrong_settings(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    for option in ("--model", "--config", "--chat-template"):
        assert main([*command.split(), option, str(tmp_path / "modle")]) == 2
        assert "disk" not in capsys.readouterr().err


def test_give_up_status_replaces_final_exit_codes_only() -> None:
    wrong = ["serve", "--set", "server.prot=1"]
    assert main(wrong) == 2
    assert main([*wrong, "--give-up-status", "0"]) == 0
    unmounted = ["serve", "--model", "/media/vlm-server-absent", "--give-up-status", "0"]
    assert main(unmounted) == 75


def test_relative_model_path_starts_at_file_or_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative to the file's folder in a file, to the working folder on the command line."""
    for folder in (tmp_path / "here/model", tmp_path / "etc/model"):
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
    config = tmp_path / "etc/settings.toml"
    config.write_text('[model]\npath = "model"\n')
    monkeypatch.chdir(tmp_path / "here")
    options = build_parser().parse_args(["service", "install", "--config", str(config)])
    assert load_settings(options).model.path == str(tmp_path / "etc/model")
    options = build_parser().parse_args(["service", "install", "--set", "model.path=model"])
    assert settings_arguments(options) == [
        *("--set", f'model.path="{tmp_path / "here/model"}"'),
    ]


def test_hub_name_is_passed_on_unresolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    for given in (["--model", "org/name@v1"], ["--set", "model.path=org/name@v1"]):
        options = build_parser().parse_args(["service", "install", *given])
        loaded = load_settings(options)
        assert (loaded.model.path, loaded.model.name) == ("org/name@v1", "org/name")
        assert "org/name@v1" in settings_arguments(options)[1]
        assert str(tmp_path) not in settings_arguments(options)[1]


def test_hub_name_in_settings_file_yields_to_folder_next_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "settings.toml"
    config.write_text('[model]\npath = "org/name"\n')
    options = build_parser().parse_args(["serve", "--config", str(config)])
    assert load_settings(options).model.path == "org/name"
    folder = tmp_path / "org/name"
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    loaded = load_settings(options)
    assert (loaded.model.path, loaded.model.name) == (str(folder), "name")


def test_snapshot_model_name_is_repository_name(tmp_path: Path) -> None:
    folder = tmp_path / f"models--org--name/snapshots/{'a' * 40}"
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    for path in (folder, folder.parent.parent):
        options = build_parser().parse_args(["serve", "--model", str(path)])
        loaded = load_settings(options)
        assert (loaded.model.path, loaded.model.name) == (str(folder), "org/name")


@pytest.mark.parametrize("name", ["server.api_keys", " server.api_keys ", "server . api_keys"])
def test_service_command_line_refuses_api_keys(name: str) -> None:
    arguments = ["service", "install", "--set", f'{name}=["a-long-enough-key"]']
    with pytest.raises(ConfigError, match="settings file"):
        settings_arguments(build_parser().parse_args(arguments))


INTERRUPTED = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "uvicorn":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from vlm_server.cli.__main__ import main
sys.exit(main())
"""


def test_interrupt_during_import_ends_command_silently() -> None:
    heeding = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    ended = subprocess.run(  # whoever runs the tests in the background has it ignored
        [sys.executable, "-c", heeding + INTERRUPTED, "serve"], capture_output=True, timeout=60
    )
    assert ended.returncode == -signal.SIGINT
    assert ended.stdout == ended.stderr == b""


def test_ignored_sigint_stays_ignored() -> None:
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)" + INTERRUPTED
    ended = subprocess.run(
        [sys.executable, "-c", ignoring, "check-config"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0
    assert ended.stdout.endswith("The settings are valid.\n")


@pytest.mark.parametrize("command", ["serve", "pull o/n", "models check o/n", "ask What?"])
def test_model_commands_accept_allow_unchecked(command: str) -> None:
    options = build_parser().parse_args([*command.split(), "--allow-unchecked"])
    options.model = None
    assert load_settings(options).model.allow_unchecked
