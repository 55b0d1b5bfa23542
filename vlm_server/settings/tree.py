"""The tree of all settings, and checks of more than one value."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, get_type_hints

import msgspec

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
_CAUSES = {
    "host": ("api_keys", "api_key_file"),
    "path": ("base", "adapter"),
    "keep_alive_seconds": ("pinned",),
}
"""What other settings of its section a check of a setting depends on."""
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


def faults_of(settings: Settings) -> Iterator[tuple[str, str]]:
    """Each setting that is wrong in itself, or contradicts others, and what is wrong with it."""
    yield from _wrong_values(settings)
    yield from _exposure(settings.server)
    yield from _wrong_origins(settings.server)
    yield from _wrong_keys(settings.server)
    yield from _wrong_urls(settings)
    yield from _wrong_models(settings)


def causes_of(full: str) -> set[str]:
    """What else can be wrong for `faults_of` to find a fault of the setting `full`: wrong settings
    have their defaults there."""
    section, _, key = full.rpartition(".")
    return {full, section, *(f"{section}.{name}" for name in _CAUSES.get(key, ()))}


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


def _wrong_values(settings: Settings) -> Iterator[tuple[str, str]]:
    """No number may be NaN or infinite, nor so large that clocks or messages can't hold it; and
    each `AbsolutePath` has to be absolute."""
    for section, values in settings.sections():
        for name, hint in hints_of(type(values)).items():
            value, full = getattr(values, name), f"{section}.{name}"
            limit = MAX_FLOAT if isinstance(value, float) else MAX_INT
            if isinstance(value, int | float) and not value <= limit:
                yield full, f"`{full}` must be a number of at most {limit:g}"
            if is_absolute_path(hint):
                for path in (value,) if isinstance(value, str) else value:
                    if path and not expand_home(path).is_absolute():
                        yield full, f"`{full}` {path!r} is not absolute"


def _wrong_models(settings: Settings) -> Iterator[tuple[str, str]]:
    for name, model in settings.models.items():
        section = f"{MODELS}.{name}"
        if not name.isprintable() or not 0 < len(name) <= _MAX_NAME_CHARS or name == "default":
            yield section, f"`models`: {name!r} can't be the name of a model"
        if model.base or model.adapter:
            yield from _wrong_adapter(section, model, settings)
        elif not model.path:
            yield f"{section}.path", f"`{section}.path` is missing"
    usual = CheckpointSettings().keep_alive_seconds
    for section, checkpoint in settings.checkpoints():
        if checkpoint.pinned and checkpoint.keep_alive_seconds != usual:
            full = f"{section}.keep_alive_seconds"
            yield full, f"`{full}` has no effect on a pinned model: set `{section}.pinned = false`"
    if settings.distributed.hostfile and settings.models:
        full = "distributed.hostfile"
        yield full, f"`{full}`: only one model can be split, so list no `models`"


def _wrong_adapter(
    section: str, model: ListedModel, settings: Settings
) -> Iterator[tuple[str, str]]:
    for key, value in (("base", model.base), ("adapter", model.adapter)):
        if not value:
            yield f"{section}.{key}", f"`{section}.{key}` is missing: an adapter has both"
    for field in msgspec.structs.fields(model):
        is_own = field.name in ("base", "adapter", "aliases")
        if not is_own and getattr(model, field.name) != field.default:
            full = f"{section}.{field.name}"
            yield full, f"`{full}` has no effect: set it for {model.base or 'its base'}"
    base = settings.models.get(model.base)
    if base is not None and base.base:
        yield f"{section}.base", f"`{section}.base`: {model.base} is an adapter itself"


def _wrong_urls(settings: Settings) -> Iterator[tuple[str, str]]:
    endpoint = settings.tracing.endpoint
    if endpoint and not endpoint.startswith(("http://", "https://")):
        full = "tracing.endpoint"
        yield full, f"`{full}` {endpoint!r} is not an http or https URL"
    for host in settings.urls.https_hosts:
        if not _HOST_PATTERN.fullmatch(host):
            full = "urls.https_hosts"
            yield full, f"`{full}`: {host!r} is not a host, `*` or `*.` and a host's last part"
    if "" in settings.urls.file_folders:
        yield "urls.file_folders", "`urls.file_folders`: a path is empty"


def _wrong_origins(server: Server) -> Iterator[tuple[str, str]]:
    full = "server.cors_origins"
    for origin in server.cors_origins:
        if origin == "*" and server.needs_key:
            yield full, f"`{full}`: with API keys, name the origins in place of *"
        if origin != "*" and not any(
            pattern.fullmatch(origin.lower()) for pattern in (ORIGIN, _EXTENSIONS)
        ):
            forms = "`https://host`, `http://host:port`, `null`, `scheme://*` of extensions, or `*`"
            yield full, f"`{full}`: {origin!r} is not {forms}"


def _exposure(server: Server) -> Iterator[tuple[str, str]]:
    if not is_loopback(server.host) and not server.needs_key:
        yield (
            "server.host",
            f"`server.host` {server.host!r} can be reached from other machines: "
            "set `server.api_key_file` or `server.api_keys`, or listen on 127.0.0.1",
        )


def _wrong_keys(server: Server) -> Iterator[tuple[str, str]]:
    """The texts do not show the keys."""
    for i, key in enumerate(server.api_keys):
        if fault := fault_of_key(key):
            yield "server.api_keys", f"`server.api_keys[{i}]` {fault}"
