"""The tree of all settings, and checks of more than one value."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, get_type_hints

import msgspec

from vlm_server.errors import ConfigError
from vlm_server.settings.engine import Distributed, EngineSettings, SchedulerSettings
from vlm_server.settings.front import (
    BatchSettings,
    DeadlineSettings,
    FileSettings,
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
from vlm_server.settings.model import CheckpointSettings, ListedModel, ModelSettings
from vlm_server.settings.paths import expand_home
from vlm_server.settings.quantities import MAX_FLOAT, MAX_INT, MIN_KEY_CHARS, is_absolute_path

_HOST_PATTERN = re.compile(r"\*|(\*\.)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?", re.IGNORECASE)
ORIGIN = re.compile(
    r"null|[a-z][a-z0-9+.-]{0,31}://(\[[0-9a-f:]{2,39}\]|[a-z0-9._-]{0,255})(:[0-9]{1,5})?"
)
"""The origin of a web page in lower case: scheme, host and port, or `null`."""
_EXTENSIONS = re.compile(r"(?!https?:)[a-z][a-z0-9+.-]*://\*")


MODELS = "models"
"""The section with a table for each model."""
_MAX_NAME_CHARS = 256


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

    def checkpoints(self) -> Iterator[tuple[str, CheckpointSettings]]:
        """The section and the settings of each model."""
        yield "model", self.model
        yield from ((f"{MODELS}.{name}", model) for name, model in self.models.items())

    def sections(self) -> Iterator[tuple[str, msgspec.Struct]]:
        """The name of each table, as TOML has it, and what is in it."""
        for field in msgspec.structs.fields(self):
            if field.name == MODELS:
                yield from ((f"{MODELS}.{name}", model) for name, model in self.models.items())
            else:
                yield field.name, getattr(self, field.name)


def kind_of(section: str) -> type[msgspec.Struct]:
    """The type of `section`, which may be `models.NAME`. Raises KeyError if there is none."""
    kind: type[msgspec.Struct] = _KINDS[section.partition(".")[0]]
    return kind


@cache
def hints_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The types of the settings of a section, by name, with their bounds."""
    return get_type_hints(kind, include_extras=True)


SECTIONS = Settings.__struct_fields__
_KINDS: dict[str, Any] = get_type_hints(Settings) | {MODELS: ListedModel}


def all_names() -> list[str]:
    """`section.name` of all settings but those of `[models.NAME]`."""
    sections = (section for section in SECTIONS if section != MODELS)
    return [f"{section}.{name}" for section in sections for name in hints_of(kind_of(section))]


def check(settings: Settings) -> None:
    """Raises ConfigError for settings that are wrong in themselves, or that contradict others."""
    _check_values(settings)
    _check_exposure(settings.server)
    _check_origins(settings.server)
    _check_keys(settings.server)
    _check_urls(settings)
    _check_models(settings)


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


def _check_values(settings: Settings) -> None:
    """No number may be NaN or infinite, nor so large that clocks or messages can't hold it; and
    each `AbsolutePath` has to be absolute."""
    for section, values in settings.sections():
        for name, hint in hints_of(type(values)).items():
            value = getattr(values, name)
            limit = MAX_FLOAT if isinstance(value, float) else MAX_INT
            if isinstance(value, int | float) and not value <= limit:
                raise ConfigError(f"`{section}.{name}` must be a number of at most {limit:g}")
            if is_absolute_path(hint):
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
    for section, checkpoint in settings.checkpoints():
        if (
            checkpoint.pinned
            and checkpoint.keep_alive_seconds != CheckpointSettings().keep_alive_seconds
        ):
            raise ConfigError(
                f"{section}.keep_alive_seconds has no effect on a pinned model: "
                f"set {section}.pinned = false"
            )
    if settings.distributed.hostfile and settings.models:
        raise ConfigError("distributed.hostfile: only one model can be split, so list no `models`")


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
    if "" in settings.urls.file_folders:
        raise ConfigError("urls.file_folders: a path is empty")


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
