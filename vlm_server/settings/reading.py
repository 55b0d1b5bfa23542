"""Reading of settings: from a file, from the environment and from `section.key=value`."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from vlm_server.errors import ConfigError
from vlm_server.settings.environment import settings_in, variable_of
from vlm_server.settings.faults import (
    COMMAND_LINE,
    RENAMED,
    Places,
    explain,
    explain_toml,
    lines_of,
    nearest,
)
from vlm_server.settings.paths import expand_home, missing_path_error, why_unreadable
from vlm_server.settings.quantities import (
    AUTO,
    OFF,
    bare,
    empty_of,
    is_list,
    is_text,
    value_of,
    word_of,
)
from vlm_server.settings.tree import (
    MODELS,
    SECTIONS,
    Settings,
    all_names,
    causes_of,
    faults_of,
    hints_of,
    kind_of,
)

Fault = tuple[str, str]
"""A setting or section, and what is wrong with it."""
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(@\S+)?")
_PATHS = ("path", "chat_template", "adapter", "drafter")
"""Settings of a model that may be relative paths."""


def load(
    path: Path | None = None,
    overrides: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Settings from the defaults, the TOML file at `path`, the environment, and `section.key=value`
    lines; a later one wins.

    Raises ConfigError, naming the setting, if one is unknown, of the wrong type or out of
    bounds, if the address is not loopback and there is no API key, or if a path that has to be
    absolute is relative; NotAvailable if the file's disk is not mounted. `model.path` in a file
    starts at its folder, unless there is no such folder and it may be a name of the hub.
    """
    return load_with_sources(path, overrides, environment)[0]


def load_with_sources(
    path: Path | None = None,
    overrides: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> tuple[Settings, dict[str, str]]:
    """The same, and where each setting that is no default was given, by `section.key`."""
    settings, places, faults = read(path, overrides, environment)
    if faults:
        raise ConfigError(*dict.fromkeys(text for _, text in faults))
    return settings, places.sources


def read(
    path: Path | None = None,
    overrides: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> tuple[Settings, Places, list[Fault]]:
    """The settings that can be read, the places of all, and each fault, its text with its place.

    The file is read once: it may be a pipe. Raises ConfigError for a file that can't be read, and
    for unknown variables.
    """
    table, lines = _read_toml(path) if path else ({}, {})
    places = Places(path, lines, sources := dict.fromkeys(_names_in(table), str(path)))
    for full, text in settings_in(environment or {}).items():
        section, _, key = full.partition(".")
        _set(table, section, key, _read_text(text, _hint(section, key)))
        sources[full] = variable_of(full)
    for override in overrides:
        sources[_apply_override(table, override)] = COMMAND_LINE
    faults = list(_wrong_names(table))
    settings = _settings(table, faults)
    wrong = {full for full, _ in faults}
    faults += [fault for fault in faults_of(settings) if wrong.isdisjoint(causes_of(fault[0]))]
    faults.sort(key=lambda fault: places.line_of(fault[0]))
    placed = [(full, f"{places.of(full)}{text}") for full, text in faults]
    return settings, places, list(dict.fromkeys(placed))


def change(settings: Settings, values: Mapping[str, Any]) -> tuple[Settings, list[Fault]]:
    """`settings` with other `values`, by `section.key`, and what is wrong with these, in themselves
    or beside the other settings. Values are as in a file; those that are no text there may also be
    as outside of one."""
    table: dict[str, Any] = {}
    faults: list[Fault] = []
    for full, value in values.items():
        section, _, key = full.rpartition(".")
        if section in ("", MODELS):
            faults.append((full, f"there is no setting `{full}`"))
        else:
            hint = _hint(section, key)
            is_outer = isinstance(value, str) and not is_text(hint)
            _set(table, section, key, _read_text(value, hint) if is_outer else value)
    faults += _wrong_names(table)
    alone = _settings(table, faults)
    if faults:
        return settings, faults
    changed = settings
    for full in values:
        changed = _merged(changed, alone, *full.rpartition(".")[::2])
    known = set(faults_of(settings))
    return changed, [fault for fault in faults_of(changed) if fault not in known]


def _merged(settings: Settings, other: Settings, section: str, key: str) -> Settings:
    """`settings` with one setting of `other`."""
    top, dot, model = section.partition(".")
    mine, its = getattr(settings, top), getattr(other, top)
    if dot:
        one = msgspec.structs.replace(
            mine.get(model, its[model]), **{key: getattr(its[model], key)}
        )
        return msgspec.structs.replace(settings, **{top: mine | {model: one}})
    part = msgspec.structs.replace(mine, **{key: getattr(its, key)})
    return msgspec.structs.replace(settings, **{top: part})


def _wrong_names(table: Mapping[str, Any]) -> Iterator[Fault]:
    """Each unknown or former name in `table`, and what is wrong with it."""
    for full in _names_in(table):
        section, _, key = full.rpartition(".")
        if (top := full.partition(".")[0]) not in SECTIONS:
            if not isinstance(table[top], dict) and (meant := nearest(top, all_names()[::-1])):
                yield top, f"`{top}` is in no section{meant}"
                continue
            yield top, f"there is no section `{top}`{nearest(top, SECTIONS)}"
        elif (new := RENAMED.get(full)) is not None:
            yield full, f"`{full}` is called `{new}` now"
        elif section and section != MODELS and key not in hints_of(kind_of(section)):
            names = [f"{section}.{known}" for known in hints_of(kind_of(section))]
            names += [] if top == MODELS else all_names()
            yield full, f"there is no setting `{full}`{nearest(full, names)}"


def _settings(table: Mapping[str, Any], faults: list[Fault]) -> Settings:
    """The settings in `table` that are right; what is wrong with others goes to `faults`."""
    sections = dict[str, Any]()
    for name in (name for name in SECTIONS if name in table):
        keys = table[name]
        if name == MODELS and isinstance(keys, dict):
            names = [(model, f"{name}.{model}") for model in keys]
            sections[name] = {model: _section(full, keys[model], faults) for model, full in names}
        else:
            sections[name] = _section(name, keys, faults)
    return Settings(**sections)


def _section(section: str, keys: Any, faults: list[Fault]) -> Any:
    """The settings of a table."""
    kind = kind_of(section)
    if not isinstance(keys, dict):
        faults.append((section, f"`{section}` has to be a table: [{section}]"))
        return {} if section == MODELS else kind()
    hints, values = hints_of(kind), dict[str, Any]()
    for key in (key for key in keys if key in hints):
        full = f"{section}.{key}"
        try:
            value = _read_value(full, keys[key], hints[key])
            values[key] = getattr(msgspec.convert({key: value}, kind), key)
        except msgspec.ValidationError as error:
            faults.append((full, explain(str(error), full, hints[key], keys[key])))
        except ValueError as error:
            faults.append((full, f"`{full}`: {error}"))
    return kind(**values)


def _hint(section: str, key: str) -> Any:
    """The type of a setting; None if there is no such setting."""
    is_known = section.partition(".")[0] in SECTIONS
    return hints_of(kind_of(section)).get(key) if is_known else None


def _read_value(full: str, value: Any, hint: Any) -> Any:
    """The value of the setting `full`: units and words become numbers. Raises ValueError."""
    word = word_of(hint)
    if word and value in ("", []):
        raise ValueError(f"it can't be empty, but `{word}`")
    if word and value == word:
        return empty_of(hint)
    return value_of(full.rpartition(".")[2], value, hint) if isinstance(value, str) else value


def _read_text(text: str, hint: Any) -> Any:
    """A value outside of a file: as TOML has it, but texts and lists of texts need no quotes."""
    text = text.strip()
    if bare(hint) is bool and text.casefold() in ("true", "false"):
        return text.casefold() == "true"
    is_word = text and text == word_of(hint)
    if is_list(hint) and not is_word and not text.startswith("["):
        return [item.strip() for item in text.split(",") if item.strip()]
    if is_text(hint) and not text.startswith(("'", '"')):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text  # a size, a word, or wrong


def _read_toml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The settings in a file, and the line in which each begins."""
    try:
        table = tomllib.loads(content := path.read_text(encoding="utf-8"))
    except OSError as error:
        text = f"can't read {path}: {why_unreadable(path, error)}"
        is_missing = isinstance(error, FileNotFoundError)
        raise missing_path_error(path, text) if is_missing else ConfigError(text) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(explain_toml(path, str(error))) from None
    listed_models = table.get(MODELS)
    _resolve_paths("model", table.get("model"), path.absolute().parent)
    for name, model in listed_models.items() if isinstance(listed_models, dict) else ():
        _resolve_paths(f"{MODELS}.{name}", model, path.absolute().parent)
    return table, lines_of(content)


def _resolve_paths(section: str, model: Any, folder: Path) -> None:
    for key in _PATHS if isinstance(model, dict) else ():
        text = model.get(key)
        if not isinstance(text, str) or text in ("", AUTO, OFF, word_of(_hint(section, key))):
            continue
        model[key] = resolved_path(text, folder, may_be_name=key == "path")


def resolved_path(text: str, folder: Path, *, may_be_name: bool) -> str:
    """The path `text` of a settings file in `folder`, unless it is a name of the hub there."""
    path = folder / expand_home(text)
    is_name = may_be_name and _HUB_NAME.fullmatch(text) and not os.path.exists(path)
    return text if is_name else str(path)


def _names_in(table: Mapping[str, Any]) -> Iterator[str]:
    """Each `section.key` in `table`, with those in `[models]`; or a section that is no table."""
    for section, keys in table.items():
        if not isinstance(keys, dict):
            yield section
        elif section == MODELS:
            yield from (f"{MODELS}.{name}" for name in _names_in(keys))
        else:
            yield from (f"{section}.{key}" for key in keys)


def _apply_override(table: dict[str, Any], override: str) -> str:
    """The name of the setting that is changed."""
    full, equals, text = override.partition("=")
    section, dot, key = full.strip().rpartition(".")  # a model's name may have dots
    if not (equals and dot and section and key) or section == MODELS:
        form = f"{MODELS}.NAME.key=value" if section == MODELS else "section.key=value"
        raise ConfigError(f"expected {form}, not {override!r}")
    _set(table, section, key, _read_text(text, _hint(section, key)))
    return f"{section}.{key}"


def _set(table: dict[str, Any], section: str, key: str, value: Any) -> None:
    """Change the setting in `table`."""
    *above, name = section.split(".", 1) if section.startswith(f"{MODELS}.") else [section]
    for outer in above:
        table = table.setdefault(outer, {})
    if not (isinstance(table, dict) and isinstance(inner := table.setdefault(name, {}), dict)):
        raise ConfigError(f"`{section}` has to be a table: [{section}]")
    inner[key] = value
