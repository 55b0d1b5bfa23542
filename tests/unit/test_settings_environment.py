"""Settings come from the default file or `--config`, the environment and options, in this order."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from vlm_server.cli import options
from vlm_server.errors import ConfigError
from vlm_server.settings import (
    Settings,
    all_names,
    default_file,
    load_with_sources,
    settings_in,
    variable_of,
)

PORT = "VLM_SERVER_SERVER_PORT"


def arguments(config: Path | None = None, *overrides: str) -> argparse.Namespace:
    return argparse.Namespace(config=config, set=list(overrides), model=None)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of settings of a user without any."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "vlm-server").mkdir()
    return tmp_path / "vlm-server"


def test_later_source_wins(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert options.load_settings(arguments()).server.port == 8000
    (home / "config.toml").write_text("[server]\nport = 1\n[log]\nlevel = 'error'\n")
    assert options.load_settings(arguments()).server.port == 1
    config = tmp_path / "my.toml"
    config.write_text("[server]\nport = 2\n")
    settings, sources = options.load_settings_with_sources(arguments(config))
    assert (settings.server.port, sources["server.port"]) == (2, str(config))
    assert settings.log.level == "info", "the default file is not read beside another"
    monkeypatch.setenv(PORT, "3")
    settings, sources = options.load_settings_with_sources(arguments(config))
    assert (settings.server.port, sources["server.port"]) == (3, PORT)
    settings, sources = options.load_settings_with_sources(arguments(config, "server.port=4"))
    assert (settings.server.port, sources["server.port"]) == (4, "command line")


def test_default_file_is_in_xdg_config_home_or_dot_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    usual = Path("/home/me/.config/vlm-server/config.toml")
    assert default_file({}) == default_file({"XDG_CONFIG_HOME": "relative"}) == usual
    assert default_file({"XDG_CONFIG_HOME": "/etc/me"}) == Path("/etc/me/vlm-server/config.toml")


def test_wrong_default_file_is_refused(home: Path) -> None:
    (home / "config.toml").write_text("[server]\nprot = 1\n")
    with pytest.raises(ConfigError, match=r"config.toml, line 2: .* did you mean `server.port`"):
        options.load_settings(arguments())


def test_every_setting_has_its_own_variable() -> None:
    names = all_names()
    assert len({variable_of(name) for name in names}) == len(names) > 100
    for name in names:
        assert settings_in({variable_of(name): "x"}) == {name: "x"}


@pytest.mark.parametrize(
    ("variable", "text", "section", "name", "value"),
    [
        ("VLM_SERVER_CACHE_MAX_DISK_BYTES", "20 GB", "cache", "max_disk_bytes", 20 * 10**9),
        ("VLM_SERVER_MEMORY_MAX_BYTES", "auto", "memory", "max_bytes", None),
        ("VLM_SERVER_MODEL_ALIASES", "gpt-*,claude-*", "model", "aliases", ("gpt-*", "claude-*")),
        ("VLM_SERVER_MODEL_NAME", "123", "model", "name", "123"),
        ("VLM_SERVER_BATCHES_ON_BATTERY", "TRUE", "batches", "on_battery", True),
        ("VLM_SERVER_DEADLINES_QUEUE_TIMEOUT_SECONDS", "1h30m", "deadlines",
         "queue_timeout_seconds", 5400),
    ],
)  # fmt: skip
def test_variables_have_values_as_overrides_have(
    variable: str, text: str, section: str, name: str, value: object
) -> None:
    settings, _ = load_with_sources(None, (), {variable: text})
    assert getattr(getattr(settings, section), name) == value


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("VLM_SERVER_SERVER_PROT", "did you mean `VLM_SERVER_SERVER_PORT`"),
        ("VLM_SERVER_SEVER_PORT", "did you mean `VLM_SERVER_SERVER_PORT`"),
        ("VLM_SERVER_CACHE_DISK_BYTES", "did you mean `VLM_SERVER_CACHE_MAX_DISK_BYTES`"),
        (PORT, r"VLM_SERVER_SERVER_PORT: `server.port`: it has to be a whole number"),
        ("VLM_SERVER_CACHE_DISK_PATH", "is called VLM_SERVER_CACHE_DISK_FOLDER now"),
    ],
)
def test_wrong_variable_is_refused_by_name(variable: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_with_sources(None, (), {variable: "many"})


def test_variables_of_others_are_left_alone() -> None:
    """Kubernetes sets some for a service that is called `vlm-server`."""
    others = {
        "VLM_SERVER_API_KEY": "sk-of-clients",
        "VLM_SERVER_SERVICE_HOST": "10.0.0.1",
        "VLM_SERVER_SERVICE_PORT": "80",
        "VLM_SERVER_SERVICE_PORT_HTTP": "80",
        "VLM_SERVER_PORT": "tcp://10.0.0.1:80",
        "VLM_SERVER_PORT_80_TCP": "tcp://10.0.0.1:80",
        "VLM_SERVER_PORT_80_TCP_PROTO": "tcp",
    }
    assert load_with_sources(None, (), others) == (Settings(), {})
