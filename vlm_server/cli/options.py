"""Options that several commands share, and the settings made from them."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vlm_server.cli.usage import rare
from vlm_server.errors import ConfigError, ModelMissing, NotAvailable
from vlm_server.nearest import did_you_mean

if TYPE_CHECKING:
    from vlm_server.settings import CheckpointSettings, ModelSettings, Settings, Sources
    from vlm_server.settings.faults import Places

_NO_MODEL = "; 'vlm-server models list' shows what is here, and ORG/NAME is downloaded"
Placed = Callable[[str], AbstractContextManager[None]]
"""A block that looks at what a setting names, whose errors are kept with the setting's place."""
_SURPLUS = 1.25
"""Allowance for weights in files that the model does not use."""


def add_config_options(parser: argparse.ArgumentParser, *, are_rare: bool = False) -> None:
    """`--config` and `--set`; `are_rare` where a daemon runs with its own."""
    group = parser.add_argument_group("settings")
    config = group.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help="TOML file with settings, in place of the default",
    )
    setting = group.add_argument(
        "--set",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="one setting; overrides --config; may be repeated",
    )
    if are_rare:
        rare(config)
        rare(setting)


def add_model_option(parser: argparse.ArgumentParser) -> None:
    """`--model`, `--chat-template` and `--allow-unchecked`."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", metavar="NAME", help="ORG/NAME or ORG/NAME@REVISION, or a folder")
    add_template_option(group)
    add_unchecked_option(group)


def add_daemon_options(parser: argparse.ArgumentParser, purpose: str) -> None:
    """`--url`, `--api-key` and `--api-key-file`; `purpose` is what the daemon is for."""
    group = parser.add_argument_group("daemon")
    group.add_argument(
        "--url",
        help=f"daemon {purpose}, such as http://mac:8000 (default: that of the settings, or else "
        "the newest that you run)",
    )
    key = group.add_argument(
        "--api-key",
        metavar="KEY",
        help="API key to send (default for a daemon on this machine: the first of the settings')",
    )
    key_file = group.add_argument(
        "--api-key-file",
        metavar="FILE",
        type=Path,
        help="file with the API key to send (other users can see a key on the command line)",
    )
    rare(key)
    rare(key_file)


def add_template_option(group: argparse._ActionsContainer) -> None:
    """`--chat-template`."""
    option = group.add_argument(
        "--chat-template",
        metavar="FILE",
        type=Path,
        help="chat template in place of the checkpoint's (model.chat_template)",
    )
    rare(option)


def add_unchecked_option(group: argparse._ActionsContainer) -> None:
    """`--allow-unchecked`."""
    option = group.add_argument(
        "--allow-unchecked",
        action="store_true",
        default=None,
        help="serve a model family that no test covers (model.allow_unchecked)",
    )
    rare(option)


def parse_settings(words: Sequence[str]) -> argparse.Namespace:
    """The options of model and settings in a service's command line. Raises ConfigError."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_model_option(parser)
    add_config_options(parser)
    try:
        return parser.parse_known_args(words)[0]
    except argparse.ArgumentError as error:
        raise ConfigError(f"the service's command line: {error}") from None


def load_settings(
    options: argparse.Namespace, environment: Mapping[str, str] | None = None
) -> Settings:
    """The settings from a file, the environment, `--set`, `--model`, `--host` and `--port`; a later
    one wins. The file is `--config`, else the default one, if it is there. environment: this
    process's, by default.

    `model.path` becomes the folder of a checkpoint on this machine, else the name to download;
    `model.name` its name in the API. Raises ConfigError, also if there is no checkpoint or the key
    file can't be used; NotAvailable if a folder's disk is not mounted, or a folder is empty.
    """
    return load_settings_with_sources(options, environment)[0]


def load_settings_only(arguments: argparse.Namespace) -> Settings:
    """`load_settings` for a command whose MODEL is another than the settings'."""
    return load_settings(argparse.Namespace(**vars(arguments) | {"model": None}))


def load_settings_with_sources(
    options: argparse.Namespace, environment: Mapping[str, str] | None = None
) -> tuple[Settings, Sources]:
    """Settings, and where each was given; see `load_settings`."""
    loaded, places, faults = read_settings(options, environment)
    raise_all(faults)
    return loaded, places.sources


def raise_all(faults: Sequence[ConfigError]) -> None:
    """Raises one ConfigError for all `faults`; NotAvailable if a restart may mend all of them."""
    kinds = {type(fault) for fault in faults}
    if faults:
        kind = NotAvailable if kinds == {NotAvailable} else ConfigError
        raise kind(*(text for fault in faults for text in fault.args))


def read_settings(
    options: argparse.Namespace, environment: Mapping[str, str] | None = None
) -> tuple[Settings, Places, list[ConfigError]]:
    """The settings that can be read, the places of all, and each fault; see `load_settings`.

    Raises ConfigError for a file that can't be read, and for unknown variables.
    """
    from vlm_server import settings

    words = tuple(overrides(options))
    environment = os.environ if environment is None else environment
    loaded, places, wrong = settings.read(config_file(options), words, environment)
    faults = [ConfigError(text) for _, text in wrong]

    @contextmanager
    def placed(full: str) -> Iterator[None]:
        """Keep an error that is about the setting `full`, unless that is wrong in itself."""
        try:
            yield
        except ConfigError as error:
            if full not in dict(wrong):
                faults.append(type(error)(*(f"{places.of(full)}{text}" for text in error.args)))

    loaded = _with_checkpoints(loaded, placed)
    _check_files(loaded, placed)
    return loaded, places, faults


def _with_checkpoints(loaded: Settings, placed: Placed) -> Settings:
    """`loaded` with the folders of the models that are on this machine."""
    import msgspec

    model, models = loaded.model, dict(loaded.models)
    with placed("model.path"):
        model = find_checkpoint(model) if model.path else model
    for name, listed in loaded.models.items():
        full = f"models.{name}.path"
        with placed(full):
            if listed.path and not listed.base:
                checkpoint = listed.as_model("", loaded.model.search_folders)
                path = find_checkpoint(checkpoint, full).path
                models[name] = msgspec.structs.replace(listed, path=path)
    return msgspec.structs.replace(loaded, model=model, models=models)


def _check_files(loaded: Settings, placed: Placed) -> None:
    """Look for the files and folders that settings name, besides those of models."""
    from vlm_server.api.http.access import keys
    from vlm_server.supervisor.engine_process.ranks import read_hostfile

    for name, listed in loaded.models.items():
        with placed(f"models.{name}.adapter"):
            if listed.base:
                _check_folder(f"models.{name}.adapter", listed.adapter, "adapter_config.json")
    for section, checkpoint in loaded.checkpoints():
        for key, check in (("chat_template", _check_template), ("drafter", _check_drafter)):
            with placed(f"{section}.{key}"):
                check(f"{section}.{key}", checkpoint)
    with placed("server.api_key_file"):
        keys.check_settings(loaded.server)
    with placed("distributed.hostfile"):
        if loaded.distributed.hostfile:
            read_hostfile(Path(loaded.distributed.hostfile))


def config_file(options: argparse.Namespace) -> Path | None:
    """The file of `--config`, else the default one; None if that is not there either."""
    from vlm_server.settings import default_file

    path: Path = options.config or default_file(os.environ)
    return path if options.config or path.exists() else None


def find_checkpoint(model: ModelSettings, setting: str = "model.path") -> ModelSettings:
    """`model` with folder and name of a checkpoint on this machine. Raises as `check_model`."""
    from vlm_server.hub.find import locate
    from vlm_server.hub.names import to_download

    checkpoint = locate(model)
    if to_download(checkpoint.path) is None:
        check_model(Path(checkpoint.path), setting)
    return checkpoint


def settings_arguments(options: argparse.Namespace) -> list[str]:
    """`options` as arguments for `serve`, with absolute paths. Raises ConfigError for API keys."""
    arguments: list[str] = []
    for name in ("config", "chat_template", "hostfile"):  # not every command has all of them
        if (path := getattr(options, name, None)) is not None:
            arguments += [f"--{name.replace('_', '-')}", str(path.absolute())]
    if options.model is not None:
        arguments += ["--model", _portable_model(options.model)]
    if getattr(options, "allow_unchecked", None):
        arguments += ["--allow-unchecked"]
    for override in options.set:
        arguments += ["--set", _portable(override)]
    return arguments


def _portable_model(text: str) -> str:
    """A path made absolute; a name unchanged."""
    from vlm_server.hub.names import HubName
    from vlm_server.settings import EMBEDDED_MODEL
    from vlm_server.settings.paths import expand_home

    path = expand_home(text)
    is_name = text == EMBEDDED_MODEL or (not path.exists() and HubName.parse(text))
    return text if is_name else str(path.absolute())


def check_model(path: Path, setting: str) -> None:
    """Raises ConfigError unless `path`, from `setting`, may be the folder of a checkpoint.

    NotAvailable or ModelMissing say that nothing is there.
    """
    from vlm_server.hub.find import all_names
    from vlm_server.hub.layout import fault_of, missing_files_of
    from vlm_server.settings.paths import missing_path_error, why_unreadable

    try:
        str(path).encode()
    except UnicodeEncodeError:  # the API could not show its name
        raise ConfigError(f"`{setting}`: the name {str(path)!a} is not UTF-8: change it") from None
    if fault := fault_of(path):
        raise ConfigError(f"`{setting}`: {fault}")
    try:
        if (path / "config.json").is_file():
            (path / "config.json").open("rb").close()
            return
        names = os.listdir(path)
    except FileNotFoundError:
        close = did_you_mean(path.name, all_names()) or _NO_MODEL
        text = f"`{setting}`: {path} is not the folder of a checkpoint: it is not there{close}"
        raise missing_path_error(path, text, ModelMissing) from None
    except OSError as error:
        reason = why_unreadable(path, error)
        raise ConfigError(f"`{setting}`: can't read {path}: {reason}") from None
    if not names:
        raise NotAvailable(f"`{setting}`: {path} is empty (is its disk mounted?)")
    raise ConfigError(f"`{setting}`: {path} {missing_files_of(names)}")


def check_memory_limit(settings: Settings) -> None:
    """Raises ModelLoadError if `memory.max_bytes` can't hold the files of a pinned model.

    Skipped for a model that several hosts share, and for a limit relative to the memory.
    """
    from vlm_server.errors import ModelLoadError
    from vlm_server.hub import layout
    from vlm_server.models import EMBEDDED
    from vlm_server.sizes import file_size, memory_size

    limit_bytes = settings.memory.known_limit_bytes
    pinned = [model for _, model in settings.checkpoints() if model.pinned]
    for model in pinned if limit_bytes and not settings.distributed.hostfile else ():
        stored_bytes = layout.stored_bytes(Path(model.path) if model.path else EMBEDDED)
        needed_bytes = (
            stored_bytes / _SURPLUS / (2 if model.dtype in ("float16", "bfloat16") else 1)
        )
        if needed_bytes > limit_bytes:
            raise ModelLoadError(
                f"the weights do not fit: those of {model.path or 'the embedded model'} take "
                f"{file_size(stored_bytes)} in their files, and {memory_size(limit_bytes)} are "
                "allowed: raise memory.max_bytes, or serve a smaller or a quantized checkpoint"
            )


def _check_template(setting: str, checkpoint: CheckpointSettings) -> None:
    """Raises ConfigError or NotAvailable if the chat template is not there."""
    from vlm_server.settings.paths import expand_home, missing_path_error

    template = expand_home(checkpoint.chat_template)
    if checkpoint.chat_template and not os.path.isfile(template):
        raise missing_path_error(template, f"`{setting}`: there is no file {template}")


def _check_drafter(setting: str, checkpoint: CheckpointSettings) -> None:
    """Raises ConfigError or NotAvailable if a drafter that is named is not there."""
    from vlm_server.settings import AUTO, OFF

    if checkpoint.drafter not in (AUTO, OFF):
        _check_folder(setting, checkpoint.drafter, "config.json")


def _check_folder(setting: str, folder: str, file: str) -> None:
    """Raises ConfigError or NotAvailable if the folder of `setting` does not have `file`."""
    from vlm_server.settings.paths import expand_home, missing_path_error

    path, noun = expand_home(folder), setting.rpartition(".")[2]
    if not os.path.isfile(path / file):
        raise missing_path_error(path, f"`{setting}`: {path} is no {noun}: it has no {file}")


def _portable(override: str) -> str:
    """`override` with absolute paths, for a service's file."""
    from vlm_server import settings
    from vlm_server.settings.paths import expand_home

    name = override.partition("=")[0].replace(" ", "").replace("\t", "")
    if name == "server.api_keys":
        raise ConfigError(
            "server.api_keys: every user of this machine can read a service's command line; put "
            "them into a settings file that only you can read (chmod 600), and pass --config"
        )
    if name not in ("model.path", "model.chat_template", "model.drafter"):
        return override
    model = settings.load(None, (override,)).model
    if name == "model.path" and model.path:
        return f"{name}={_toml(_portable_model(model.path))}"
    file = model.chat_template if name == "model.chat_template" else model.drafter
    if file and file not in (settings.AUTO, settings.OFF):
        return f"{name}={_toml(expand_home(file).absolute())}"
    return override


def overrides(options: argparse.Namespace) -> Sequence[str]:
    """Options as `section.key=value`, the last of which wins."""
    from vlm_server.settings.paths import expand_home

    hostfile: Path | None = getattr(options, "hostfile", None)
    value_by_setting = {
        "model.path": getattr(options, "model", None),
        "model.chat_template": getattr(options, "chat_template", None),
        "model.allow_unchecked": getattr(options, "allow_unchecked", None),
        "distributed.hostfile": None if hostfile is None else expand_home(hostfile).absolute(),
        "server.host": getattr(options, "host", None),
        "server.port": getattr(options, "port", None),
        "log.format": "verbose" if getattr(options, "verbose", False) else None,
    }
    assignments = [
        f"{name}={_toml(value)}" for name, value in value_by_setting.items() if value is not None
    ]
    return [*options.set, *assignments]


def _toml(value: Path | str | int) -> str:
    return json.dumps(value if isinstance(value, int) else str(value), ensure_ascii=False)
