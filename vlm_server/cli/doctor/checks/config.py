"""The settings, and the model that they name."""

from __future__ import annotations

import asyncio
import difflib
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from vlm_server.cli.doctor.finding import Finding, ok, problem, size_text, warning
from vlm_server.cli.doctor.situation import Situation
from vlm_server.errors import ModelLoadError
from vlm_server.hub.names import to_download
from vlm_server.hub.survey import Survey, SurveyRequest, survey
from vlm_server.settings import Settings


def look(situation: Situation) -> list[Finding]:
    """Whether the settings are valid."""
    return [settings(situation)]


def look_at_model(situation: Situation) -> list[Finding]:
    """Whether the model can be served."""
    return [model(situation)]


def settings(situation: Situation) -> Finding:
    """Every unknown name is listed, not only the first."""
    changed = len(situation.sources)
    if not situation.fault:
        where = f"{changed} set, from {situation.origin}" if changed else "all are defaults"
        return ok("settings", f"valid; {where}")
    unknown = list(unknown_names(situation.arguments.config))
    return problem(
        "settings",
        "; ".join(unknown) or situation.fault,
        "mend them; `vlm-server check-config` checks them, docs/configuration.md lists them. "
        "The rest of this report uses the defaults",
    )


def unknown_names(path: Path | None) -> Iterator[str]:
    """What a settings file names that there is no setting for, with the nearest that there is."""
    sections = {field.name: field for field in msgspec.structs.fields(Settings)}
    for section, keys in _table(path).items():
        if section not in sections:
            yield f"there is no section [{section}]{_nearest(section, sections)}"
            continue
        kind = type(sections[section].default)
        if not (isinstance(keys, dict) and issubclass(kind, msgspec.Struct)):
            continue
        known = [field.name for field in msgspec.structs.fields(kind)]
        for key in keys:
            if key not in known:
                yield f"there is no setting {section}.{key}{_nearest(key, known)}"


def model(situation: Situation) -> Finding:
    """Whether it is here and fits, by the rules of loading; no weights are read."""
    if situation.fault:
        return warning("model", "not looked for, as the settings are not valid", "see `settings`")
    if situation.model_fault:
        advice = "mend model.path; `vlm-server models list` shows what is on this machine"
        return problem("model", situation.model_fault, advice)
    named = situation.model
    if not named.path:
        return ok("model", "the embedded one")
    if to_download(named.path) is not None and not Path(named.path).is_dir():
        advice = f"`vlm-server pull {named.path}` fetches it; `serve` does so by itself"
        return warning("model", f"{named.path} is not on this machine", advice)
    try:
        found = asyncio.run(survey(SurveyRequest(named, situation.settings.memory)))
    except ModelLoadError as error:
        return problem("model", f"{named.name}: {error}", "see `device`")
    return _judged(named.name, found)


def _judged(name: str, found: Survey) -> Finding:
    if found.refusal:
        return problem("model", f"{name}: {found.refusal}", "`vlm-server models check` says more")
    text = (
        f"{name} ({found.family}, {found.quantization or 'unquantized'}): "
        f"{size_text(found.weight_bytes)} of {size_text(found.limit_bytes)}, "
        f"{found.fitting_tokens} of {found.context_tokens} tokens fit"
    )
    if not found.is_checked:
        advice = "its answers may be wrong: compare them; docs/families.md lists what is checked"
        return warning("model", f"{text}; no test covers this family", advice)
    return ok("model", text)


def _table(path: Path | None) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError, RecursionError):
        return {}


def _nearest(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
