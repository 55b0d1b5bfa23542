"""Checks of the settings, of their model, and of the permissions of their files."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

from huggingface_hub import constants

from vlm_server.api.http.access import keys
from vlm_server.cli.doctor.findings import Finding, ok, problem, warning
from vlm_server.cli.doctor.situation import Situation
from vlm_server.errors import ConfigError, ModelLoadError
from vlm_server.hub.examination import ExaminationRequest, examine
from vlm_server.hub.names import to_download
from vlm_server.platform.private_folder import of_this_user
from vlm_server.settings import Server
from vlm_server.settings.paths import allow_or_move, expand_home, guarded_folder
from vlm_server.sizes import memory_size

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def settings(situation: Situation) -> Finding:
    """Whether the settings are valid."""
    num_changed = len(situation.sources)
    if not situation.fault:
        where = f"{num_changed} set, from {situation.origin}" if num_changed else "all are defaults"
        return ok("settings", f"valid; {where}")
    return problem(
        "settings",
        situation.fault,
        "mend them; `vlm-server check-config` checks them, docs/configuration.md lists them. "
        "The rest of these findings use the defaults",
    )


def model(situation: Situation) -> Finding:
    """Whether the model is here and fits, by the rules of loading; no weights are read."""
    if situation.fault:
        return warning("model", "not looked for, as the settings are not valid", "see `settings`")
    if situation.model_fault:
        advice = "mend model.path; `vlm-server models list` shows what is on this machine"
        return problem("model", situation.model_fault, advice)
    checkpoint = situation.model
    if not checkpoint.path:
        return ok("model", "the embedded one")
    if to_download(checkpoint.path) is not None and not Path(checkpoint.path).is_dir():
        advice = f"`vlm-server pull {checkpoint.path}` fetches it; `serve` does so by itself"
        return warning("model", f"{checkpoint.path} is not on this machine", advice)
    settings = situation.settings
    adapters = settings.adapters_of(checkpoint.name)
    request = ExaminationRequest(
        checkpoint, settings.memory, adapters=adapters, cache=settings.cache
    )
    try:
        examination = asyncio.run(examine(request))
    except ModelLoadError as error:
        return problem("model", f"{checkpoint.name}: {error}", "see `device`")
    if examination.refusal:
        advice = "`vlm-server models check` says more"
        return problem("model", f"{checkpoint.name}: {examination.refusal}", advice)
    text = (
        f"{checkpoint.name} ({examination.family}, {examination.quantization or 'unquantized'}): "
        f"{memory_size(examination.weight_bytes)} of {memory_size(examination.limit_bytes)}, "
        f"{examination.fitting_tokens} of {examination.context_tokens} tokens fit"
    )
    if not examination.is_checked:
        advice = "its answers may be wrong: compare them; docs/families.md lists what is checked"
        return warning("model", f"{text}; no test covers this family", advice)
    return ok("model", text)


def look_at_permissions(situation: Situation) -> list[Finding]:
    """Checks of the files that exist."""
    findings = [state_folder()]
    if (path := situation.arguments.config) is not None:
        has_keys = bool(situation.settings.server.api_keys)
        findings.append(settings_file(path, has_keys=has_keys))
    findings += guarded(situation)
    if situation.settings.server.api_key_file:
        findings.append(key_file(situation.settings.server))
    token = expand_home(constants.HF_TOKEN_PATH)
    if os.path.lexists(token):
        findings.append(secret_file("hub token", token))
    return findings


def guarded(situation: Situation) -> list[Finding]:
    """Warnings for files of the service in folders for which macOS asks the user's permission."""
    if not situation.service.path.exists():
        return []
    settings = situation.settings
    models = [model.path for model in (settings.model, *settings.models.values()) if model.path]
    paths_in_settings = [
        situation.arguments.config,
        *map(expand_home, (*models, *settings.model.search_folders)),
    ]
    paths = [path for path in paths_in_settings if path is not None and guarded_folder(path)]
    text = "macOS may not let the service read what is in {}"
    return [
        warning("guarded folder", text.format(guarded_folder(path)), f"{path}: {allow_or_move()}")
        for path in paths
    ]


def state_folder() -> Finding:
    """Whether the folder of compiled kernels, which are executed, is this user's alone."""
    check = "state folder"
    try:
        return ok(check, f"{of_this_user()}, yours alone")
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except RuntimeError as error:
        text = str(error)
    advice = "mend it, or set HOME or XDG_CACHE_HOME: each start compiles anew until then"
    return warning(check, text, advice)


def settings_file(path: Path, *, has_keys: bool) -> Finding:
    """Whether this user can read the file, and no other user if it has keys."""
    check = "settings file"
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
    except FileNotFoundError:
        return problem(check, f"{path} is not there", "name the right file: --config FILE")
    except OSError as error:
        advice = f"let this user read it: chmod u+r {path}, or chown it"
        return problem(check, f"can't read {path}: {error.strerror}", advice)
    if not stat.S_ISREG(mode):
        return problem(check, f"{path} is not a regular file", "name the right file: --config FILE")
    if has_keys and mode & _OTHERS:
        text = f"{path} has API keys, and others may read it"
        return warning(check, text, f"chmod 600 {path}")
    return ok(check, f"{path} can be read")


def key_file(server: Server) -> Finding:
    """Whether the daemon accepts the key file."""
    try:
        keys.check_settings(server)
    except ConfigError as error:
        return problem("key file", str(error), "mend it: the daemon does not start without it")
    return ok("key file", f"{server.api_key_file}, yours alone")


def secret_file(check: str, path: Path) -> Finding:
    """Whether another program's file with a secret is this user's alone."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return warning(check, f"can't see {path}: {error.strerror}", "let this user read it")
    if mode & _OTHERS:
        return warning(check, f"{path} can be read by others", f"chmod 600 {path}")
    return ok(check, f"{path}, yours alone")
