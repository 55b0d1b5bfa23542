"""The tree of all settings: reading and checks."""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from vlm_server.errors import ConfigError
from vlm_server.settings.batches import BatchSettings
from vlm_server.settings.engine import Distributed, EngineSettings, SchedulerSettings
from vlm_server.settings.faults import explain, location_of
from vlm_server.settings.files import FileSettings
from vlm_server.settings.front import (
    DeadlineSettings,
    Limits,
    Log,
    MetricsSettings,
    Server,
    Tracing,
    Urls,
    WatchSettings,
)
from vlm_server.settings.media import DocumentSettings, ImageSettings, VideoSettings
from vlm_server.settings.memory import CacheSettings, MemorySettings
from vlm_server.settings.model import AUTO, OFF, ListedModel, ModelSettings
from vlm_server.settings.paths import expand_home, missing_path_error, why_unreadable
from vlm_server.settings.quantities import MAX_FLOAT, MAX_INT, MIN_KEY_CHARS, AbsolutePath, value_of

_HOST_PATTERN = re.compile(r"\*|(\*\.)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?", re.IGNORECASE)
ORIGIN = re.compile(
    r"null|[a-z][a-z0-9+.-]{0,31}://(\[[0-9a-f:]{2,39}\]|[a-z0-9._-]{0,255})(:[0-9]{1,5})?"
)
"""The origin of a web page in lower case: scheme, host and port, or `null`."""
_EXTENSIONS = re.compile(r"(?!https?:)[a-z][a-z0-9+.-]*://\*")

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(@\S+)?")


MODELS = "models"
"""The section with a table for each model."""
_MAX_NAME_CHARS = 256
_RENAMED = {
    "limits.intake_processes": "parsing_processes",
    "limits.intake_timeout_seconds": "parsing_timeout_seconds",
}
"""Former names of settings, which are still read."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of the daemon; immutable."""

    server: Server = Server()
    model: ModelSettings = ModelSettings()
    models: dict[str, ListedModel] = {}
    limits: Limits = Limits()
    urls: Urls = Urls()
    files: FileSettings = FileSettings()
    watch: WatchSettings = WatchSettings()
    batches: BatchSettings = BatchSettings()
    image: ImageSettings = ImageSettings()
    deadlines: DeadlineSettings = DeadlineSettings()
    video: VideoSettings = VideoSettings()
    document: DocumentSettings = DocumentSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    cache: CacheSettings = CacheSettings()
    engine: EngineSettings = EngineSettings()
    memory: MemorySettings = MemorySettings()
    distributed: Distributed = Distributed()
    log: Log = Log()
    metrics: MetricsSettings = MetricsSettings()
    tracing: Tracing = Tracing()

    def adapters_of(self, base: str) -> dict[str, str]:
        """The absolute folders of the adapters of the model `base`, by the adapters' names."""
        return {
            name: str(expand_home(model.adapter).absolute())
            for name, model in self.models.items()
            if model.base and model.base == base
        }

    def sections(self) -> Iterator[tuple[str, msgspec.Struct]]:
        """The name of each table, as TOML has it, and what is in it."""
        for field in msgspec.structs.fields(self):
            if field.name == MODELS:
                yield from ((f"{MODELS}.{name}", model) for name, model in self.models.items())
            else:
                yield field.name, getattr(self, field.name)


def load(path: Path | None = None, overrides: tuple[str, ...] = ()) -> Settings:
    """Settings from the defaults, then the TOML file at `path`, then `section.key=value` lines.

    Raises ConfigError, naming the setting, if one is unknown, of the wrong type or out of
    bounds, if the address is not loopback and there is no API key, or if a path that has to be
    absolute is relative; NotAvailable if the file's disk is not mounted. `model.path` in a file
    starts at its folder, unless there is no such folder and it may be a name of the hub.
    """
    return load_with_sources(path, overrides)[0]


def load_with_sources(
    path: Path | None = None, overrides: tuple[str, ...] = ()
) -> tuple[Settings, dict[str, str]]:
    """The same, and where each setting that is no default was given, by `section.key`."""
    table: dict[str, Any] = _read_toml(path) if path else {}
    names = (f"{section}.{key}" for section, keys, _ in _tables(table) for key in keys)
    sources = dict.fromkeys(names, str(path))
    for override in overrides:
        sources[_apply_override(table, override)] = "command line"
    _read_quantities(table, path, sources)
    try:
        settings = msgspec.convert(table, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(explain(str(error), Settings, path, sources)) from None
    _check_values(settings)
    _check_exposure(settings.server)
    _check_origins(settings.server)
    _check_keys(settings.server)
    _check_urls(settings)
    _check_models(settings)
    return settings, sources


def _read_quantities(table: dict[str, Any], path: Path | None, sources: Mapping[str, str]) -> None:
    """Sizes and times of `table` that are given as text, as numbers. Raises ConfigError."""
    for section, keys, kind in _tables(table):
        hints = get_type_hints(kind) if kind else {}
        for key, value in keys.items():
            if key in hints and isinstance(value, str):
                try:
                    keys[key] = value_of(key, value, hints[key])
                except ValueError as error:
                    full = f"{section}.{key}"
                    raise ConfigError(
                        f"{location_of(path, full, sources)}`{full}`: {error}"
                    ) from None


def _tables(table: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Name, content and type of each table, with those in `[models]`; the type may be unknown."""
    kinds = get_type_hints(Settings)
    for section, keys in table.items():
        if section != MODELS:
            tables = [(section, keys, kinds.get(section))]
        else:
            inner = keys.items() if isinstance(keys, dict) else ()
            tables = [(f"{MODELS}.{name}", model, ListedModel) for name, model in inner]
        yield from (entry for entry in tables if isinstance(entry[1], dict))


def fault_of_key(key: str) -> str | None:
    """Why `key` can't be an API key, as the end of a sentence about it; None if it can."""
    if not key.isprintable() or any(character.isspace() for character in key):
        return "has a blank or a control character"
    if len(key) < MIN_KEY_CHARS:
        return f"has fewer than {MIN_KEY_CHARS} characters"
    return None


def is_loopback(host: str) -> bool:
    """Whether `host` can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        text = f"can't read {path}: {why_unreadable(path, error)}"
        is_missing = isinstance(error, FileNotFoundError)
        raise missing_path_error(path, text) if is_missing else ConfigError(text) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for section, keys in table.items():
        if isinstance(keys, dict) and section != MODELS:
            table[section] = {_current_name(section, key): value for key, value in keys.items()}
    folder, listed_models = path.absolute().parent, table.get(MODELS)
    for model in (
        table.get("model"),
        *(listed_models.values() if isinstance(listed_models, dict) else ()),
    ):
        _resolve_model_path(model, folder)
    return table


def _current_name(section: str, key: str) -> str:
    """Today's name of the setting."""
    return _RENAMED.get(f"{section}.{key}", key)


def _resolve_model_path(model: Any, folder: Path) -> None:
    if not isinstance(model, dict):
        return
    for key in ("path", "chat_template", "adapter", "drafter"):
        if not (isinstance(model.get(key), str) and model[key]):
            continue
        if key == "drafter" and model[key] in (AUTO, OFF):
            continue
        path = folder / expand_home(model[key])
        may_be_name = key == "path" and _HUB_NAME.fullmatch(model[key])
        if os.path.exists(path) or not may_be_name:
            model[key] = str(path)


def _apply_override(table: dict[str, Any], override: str) -> str:
    """The name of the setting that is changed."""
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"expected section.key=value, not {override!r}")
    inner = table.setdefault(section, {})
    if section == MODELS and isinstance(inner, dict):
        model, dot, key = key.rpartition(".")  # a model's name may have dots
        if not dot:
            raise ConfigError(f"expected models.NAME.key=value, not {override!r}")
        inner = inner.setdefault(model, {})
        section = f"{section}.{model}"
    if not isinstance(inner, dict):
        raise ConfigError(f"{section!r} is not a section")
    key = _current_name(section, key)
    try:
        inner[key] = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        inner[key] = text.strip()  # a bare word or path counts as a string
    return f"{section}.{key}"


def _check_values(settings: Settings) -> None:
    """No number may be NaN or infinite, nor so large that clocks or messages can't hold it; and
    each `AbsolutePath` has to be absolute."""
    for section, values in settings.sections():
        for name, hint in get_type_hints(type(values), include_extras=True).items():
            value = getattr(values, name)
            limit = MAX_FLOAT if isinstance(value, float) else MAX_INT
            if isinstance(value, int | float) and not value <= limit:
                raise ConfigError(f"`{section}.{name}` must be a number of at most {limit:g}")
            if AbsolutePath in (hint, *get_args(hint)):
                for path in (value,) if isinstance(value, str) else value:
                    if path and not expand_home(path).is_absolute():
                        raise ConfigError(f"{section}.{name} {path!r} is not absolute")


def _check_models(settings: Settings) -> None:
    for name, model in settings.models.items():
        if not name.isprintable() or not 0 < len(name) <= _MAX_NAME_CHARS or name == "default":
            raise ConfigError(f"models: {name!r} can't be the name of a model")
        if model.base or model.adapter:
            _check_adapter(name, model, settings)
        elif not model.path:
            raise ConfigError(f"models.{name}.path is missing")
    if settings.distributed.hosts and settings.models:
        raise ConfigError("distributed.hosts: only one model can be split, so list no `models`")


def _check_adapter(name: str, model: ListedModel, settings: Settings) -> None:
    for key, value in (("base", model.base), ("adapter", model.adapter)):
        if not value:
            raise ConfigError(f"models.{name}.{key} is missing: an adapter has both")
    for field in msgspec.structs.fields(model):
        is_own = field.name in ("base", "adapter", "aliases")
        if not is_own and getattr(model, field.name) != field.default:
            raise ConfigError(f"models.{name}.{field.name} has no effect: set it for {model.base}")
    base = settings.models.get(model.base)
    if base is not None and base.base:
        raise ConfigError(f"models.{name}.base: {model.base} is an adapter itself")


def _check_urls(settings: Settings) -> None:
    endpoint = settings.tracing.endpoint
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"tracing.endpoint {endpoint!r} is not an http or https URL")
    for host in settings.urls.https_hosts:
        if not _HOST_PATTERN.fullmatch(host):
            raise ConfigError(
                f"urls.https_hosts: {host!r} is not a host, `*` or `*.` and a host's last part"
            )
    if "" in settings.urls.file_roots:
        raise ConfigError("urls.file_roots: a path is empty")


def _check_origins(server: Server) -> None:
    for origin in server.cors_origins:
        if origin == "*" and server.needs_key:
            raise ConfigError("server.cors_origins: with API keys, name the origins in place of *")
        if origin != "*" and not any(
            pattern.fullmatch(origin.lower()) for pattern in (ORIGIN, _EXTENSIONS)
        ):
            raise ConfigError(
                f"server.cors_origins: {origin!r} is not `https://host`, `http://host:port`, "
                "`null`, `scheme://*` of extensions, or `*`"
            )


def _check_exposure(server: Server) -> None:
    if not is_loopback(server.host) and not server.needs_key:
        raise ConfigError(
            f"server.host {server.host!r} can be reached from other machines: "
            "set server.api_key_file or server.api_keys, or listen on 127.0.0.1"
        )


def _check_keys(server: Server) -> None:
    """The messages do not show the keys."""
    for i, key in enumerate(server.api_keys):
        if fault := fault_of_key(key):
            raise ConfigError(f"server.api_keys[{i}] {fault}")
