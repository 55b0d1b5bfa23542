"""`/v1/settings`: the settings in force, what automatic ones came to, and changes while running."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vlm_server.api.http import body
from vlm_server.api.http.access import keys
from vlm_server.api.http.generation import Generation
from vlm_server.errors import ConfigError, InvalidRequest
from vlm_server.hub import layout
from vlm_server.hub.find import find
from vlm_server.hub.names import to_download
from vlm_server.protocol import Stats
from vlm_server.settings import Settings, Sources, change, describe_settings
from vlm_server.settings.quantities import (
    choices_of,
    is_list,
    is_share,
    is_text,
    shown,
    unit_of,
    word_of,
)
from vlm_server.settings.reading import resolved_path
from vlm_server.settings.topics import COMMON
from vlm_server.settings.tree import hints_of, kind_of

_LIVE_SECTIONS = ("deadlines",)
_LIVE = ("log.level", "server.unknown_fields")
"""Settings, and sections of them, that are read anew for each request or line."""
_SOURCE = "changed while running"
_MAX_CHARS = 4096
"""Maximum characters of a value: TOML's parser is slow with longer ones."""
_CACHES = ("token_layout", "pixel", "encoder", "prefix", "vector")


class CurrentSettings:
    """The endpoints. What is changed here lasts until the daemon ends.

    file: the settings file, whether or not it is there or sets something; None if it is not known.
    """

    def __init__(
        self, shared: Generation, settings: Settings, sources: Sources, file: Path | None
    ) -> None:
        self._shared = shared
        self._settings = settings
        self._sources = dict(sources)
        self._file = file and str(file.absolute())

    async def show(self, _: Request) -> Response:
        """All settings, with their sources, and the names of those that matter to most people."""
        return JSONResponse(self._json())

    async def change(self, request: Request) -> Response:
        """Change settings, given as `{"section.name": value}`; all of them, or none. With
        `?check=true` change none, but look whether the settings file could have all of them.

        Raises InvalidRequest for one that is unknown, wrong, contradicts the others, or needs a
        restart.
        """
        fields = await body.read_small(request, self._settings.limits, self._shared.arriving)
        is_check = request.query_params.get("check", "false")
        if is_check not in ("true", "false"):
            raise InvalidRequest("`check` has to be true or false.", "check")
        changed = _with(self._settings, fields)
        if is_check == "true":
            for name in fields:
                await asyncio.to_thread(_check_files, changed, name, Path(self._file or "").parent)
            return Response(status_code=204)
        if fixed := next((name for name in fields if not _is_live(name)), None):
            text = (
                f"`{fixed}` can't be changed while the daemon runs: set it in a file, and restart."
            )
            raise InvalidRequest(text, fixed)
        self._settings = self._shared.settings = changed
        self._shared.server = changed.server
        if "log.level" in fields:
            logging.getLogger().setLevel(changed.log.level.upper())
        self._sources |= dict.fromkeys(fields, _SOURCE)
        return JSONResponse(self._json())

    def _json(self) -> dict[str, Any]:
        effective = self._effective()
        sections = describe_settings(self._settings, self._sources)
        for section in sections:
            hints = hints_of(kind_of(section["name"]))
            for setting in section["settings"]:
                name = f"{section['name']}.{setting['name']}"
                setting["effective"] = effective.get(name)
                setting["live"] = _is_live(name)
                hint = hints[setting["name"]]
                setting |= {"is_list": is_list(hint), "is_text": is_text(hint)}
                setting |= {"unit": unit_of(setting["name"]), "word": word_of(hint)}
                setting |= {"choices": choices_of(hint), "is_share": is_share(hint)}
                for key in ("value", "default"):
                    setting[f"{key}_written"] = shown(setting["name"], setting[key], None)
        return {"file": self._file, "common": COMMON, "sections": sections}

    def _effective(self) -> dict[str, int]:
        """What automatic settings came to, as far as engines have told; the default model's."""
        models, slots = self._shared.models, self._shared.queue_slots
        known = {
            "limits.max_waiting_bytes": slots.waiting_bytes.limit,
            "document.max_processes": self._shared.documents.max_processes,
        }
        all_stats = [stats for name in models.names if (stats := models.status(name).stats)]
        if all_stats:
            known |= effective_in(all_stats[0])
            known["memory.max_bytes"] = sum(stats.memory.limit_bytes for stats in all_stats)
        return known


def effective_in(stats: Stats) -> dict[str, int]:
    """The values of settings that may be automatic, by name, as an engine uses them."""
    caches = {cache.name: cache.limit_bytes for cache in stats.caches}
    return {
        "scheduler.max_num_seqs": stats.max_num_seqs,
        **{f"cache.max_{name}_bytes": caches[name] for name in _CACHES if name in caches},
    }


def _is_live(name: str) -> bool:
    return name in _LIVE or name.partition(".")[0] in _LIVE_SECTIONS


def _with(settings: Settings, fields: dict[str, Any]) -> Settings:
    """`settings` with those in `fields` changed. Raises InvalidRequest for the first fault."""
    try:
        msgspec.json.encode(fields)
    except UnicodeEncodeError:
        raise InvalidRequest("A text has a lone surrogate.") from None
    for name, value in fields.items():
        if isinstance(value, str) and len(value) > _MAX_CHARS:
            raise InvalidRequest(f"The value has more than {_MAX_CHARS} characters.", name)
    changed, faults = change(settings, fields)
    for full, text in faults:
        name = next((name for name in fields if f"{name}.".startswith(f"{full}.")), full)
        raise InvalidRequest(text, name)
    return changed


def _check_files(settings: Settings, name: str, folder: Path) -> None:
    """Look for the file or checkpoint that the setting `name` names; relative paths start at
    `folder`. Raises InvalidRequest."""
    section, _, key = name.rpartition(".")
    checkpoint = dict(settings.checkpoints()).get(section)
    try:
        if name == "server.api_key_file":
            keys.check_settings(settings.server)
        elif key == "path" and checkpoint is not None and checkpoint.path:
            _check_path(checkpoint.path, settings.model.search_folders, folder)
    except (ConfigError, ValueError) as error:  # the latter for a null character in a path
        raise InvalidRequest(f"`{name}`: {error}", name) from None


def _check_path(path: str, search_folders: tuple[str, ...], folder: Path) -> None:
    """Raises ConfigError unless `path` is a checkpoint on this machine, or a name of the hub."""
    path = resolved_path(path, folder, may_be_name=True)
    found = find(path, search_folders)
    if to_download(path) is None and not (found and (found.folder / layout.CONFIG).is_file()):
        raise ConfigError(f"no checkpoint is at {path}: name its folder, or ORG/NAME of the hub")
