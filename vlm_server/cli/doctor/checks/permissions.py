"""Who may read what should be secret, and whether we may read what we need."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from huggingface_hub import constants

from vlm_server.api.http.access import keys
from vlm_server.cli.doctor.finding import Finding, ok, problem, warning
from vlm_server.cli.doctor.situation import Situation
from vlm_server.errors import ConfigError
from vlm_server.platform.private_folder import of_this_user
from vlm_server.settings import Server, Settings
from vlm_server.settings.paths import allow_or_move, expanded, guarded_folder

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def look(situation: Situation) -> list[Finding]:
    """Of the files that there are."""
    findings = [state_folder()]
    if (path := situation.arguments.config) is not None:
        has_keys = bool(situation.settings.server.api_keys)
        findings.append(settings_file(path, has_keys=has_keys))
    findings += guarded(situation)
    if situation.settings.server.api_key_file:
        findings.append(key_file(situation.settings.server))
    token = expanded(constants.HF_TOKEN_PATH)
    if os.path.lexists(token):
        findings.append(secret_file("hub token", token))
    return findings


def guarded(situation: Situation) -> list[Finding]:
    """What the installed service reads from folders for which macOS asks its user first.

    It asks for each program: that the doctor may read them says nothing about the service.
    """
    if not situation.service.path.exists():
        return []
    named = [situation.arguments.config, *map(expanded, paths_of_models(situation.settings))]
    paths = [path for path in named if path is not None and guarded_folder(path)]
    text = "macOS may not let the service read what is in {}"
    return [
        warning("guarded folder", text.format(guarded_folder(path)), f"{path}: {allow_or_move()}")
        for path in paths
    ]


def paths_of_models(settings: Settings) -> list[str]:
    """Folders of models, and folders in which they are looked for."""
    models = [settings.model, *settings.models.values()]
    return [*(model.path for model in models if model.path), *settings.model.search_paths]


def state_folder() -> Finding:
    """Where kernels that the engine compiles are kept, and executed from."""
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
    """Readable by us; by others only if there are no keys in it."""
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
    """By the rules by which the daemon refuses one."""
    try:
        keys.check_settings(server)
    except ConfigError as error:
        return problem("key file", str(error), "mend it: the daemon does not start without it")
    return ok("key file", f"{server.api_key_file}, yours alone")


def secret_file(check: str, path: Path) -> Finding:
    """A file of another program that holds a secret of yours."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return warning(check, f"can't see {path}: {error.strerror}", "let this user read it")
    if mode & _OTHERS:
        return warning(check, f"{path} can be read by others", f"chmod 600 {path}")
    return ok(check, f"{path}, yours alone")
