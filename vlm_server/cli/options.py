"""Options that several commands share, and the settings made from them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vlm_server import settings
from vlm_server.api.http import keys
from vlm_server.errors import ConfigError
from vlm_server.settings import Settings

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """`--config` and `--set`."""
    parser.add_argument("--config", metavar="FILE", type=Path, help="TOML file with settings")
    parser.add_argument(
        "--set",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="one setting; overrides --config; may be repeated",
    )


def add_model_option(parser: argparse.ArgumentParser) -> None:
    """`--model`."""
    parser.add_argument("--model", metavar="PATH", type=Path, help="folder of the checkpoint")


def load_settings(options: argparse.Namespace) -> Settings:
    """Settings from `--config`, then `--set`, then `--model`, `--host` and `--port`.

    Raises ConfigError, also if `model.path` is not the folder of a checkpoint, or if the file of
    API keys can't be used.
    """
    loaded = settings.load(options.config, tuple(_overrides(options)))
    path = loaded.model.path
    if path and not (Path(path) / "config.json").is_file():
        raise ConfigError(f"model.path: {path} is not the folder of a checkpoint: no config.json")
    keys.check_settings(loaded.server)
    return loaded


def settings_arguments(options: argparse.Namespace) -> list[str]:
    """`options` as arguments for `serve`, with absolute paths."""
    arguments: list[str] = []
    if options.config is not None:
        arguments += ["--config", str(options.config.absolute())]
    if options.model is not None:
        arguments += ["--model", str(options.model.absolute())]
    for override in options.set:
        arguments += ["--set", override]
    return arguments


def _overrides(options: argparse.Namespace) -> Sequence[str]:
    own = {
        "model.path": getattr(options, "model", None),
        "server.host": getattr(options, "host", None),
        "server.port": getattr(options, "port", None),
    }
    named = [f"{name}={_toml(value)}" for name, value in own.items() if value is not None]
    return [*options.set, *named]


def _toml(value: Path | str | int) -> str:
    return json.dumps(value if isinstance(value, int) else str(value), ensure_ascii=False)
