"""A report for an issue: one file of JSON that can be read before it is sent, without secrets."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import msgspec

from vlm_server import __version__
from vlm_server.cli.doctor import log
from vlm_server.cli.doctor.checks import daemon
from vlm_server.cli.doctor.checks.port import listener
from vlm_server.cli.doctor.finding import Finding
from vlm_server.cli.doctor.secrets import Redactor, known_secrets
from vlm_server.cli.doctor.situation import Situation
from vlm_server.cli.failure import CommandFailed
from vlm_server.settings import Server, described

_VARIABLES = [
    "CUDA_VISIBLE_DEVICES",
    "DYLD_INSERT_LIBRARIES",
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "HOME",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "PATH",
    "PYTHONPATH",
    "TMPDIR",
    "VIRTUAL_ENV",
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
]
"""What of the environment matters here. Of other variables not even the name is shown."""
_NOTE = (
    "Made by `vlm-server doctor --report`. It holds no prompts, pictures, answers or keys; "
    "paths and model names are in it. Read it before you send it."
)


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Replace `path`, readable by its owner only. Raises CommandFailed."""
    text = json.dumps(report, indent=1, ensure_ascii=False)
    if path.is_dir():
        raise CommandFailed(f"can't write {path}: it is a folder")
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text + "\n")
        draft.replace(path)
    except OSError as error:
        raise CommandFailed(f"can't write {path}: {error.strerror}") from None


def contents(
    findings: Sequence[Finding], situation: Situation, log_path: Path | None
) -> dict[str, Any]:
    """All that the report says, with secrets masked in every text of it."""
    redactor = Redactor(known_secrets(situation), situation.home)
    found: dict[str, Any] = redactor.value(
        {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "version": __version__,
            "platform": platform.platform(),
            "findings": msgspec.to_builtins(list(findings)),
            "settings": {"from": situation.origin, "changed": _changed(situation)},
            "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
            "packages": packages(),
            "daemon": running(situation.settings.server),
            "log": log.presentable(log.tail(log_path)),
        }
    )
    return {"note": _NOTE, **found}


def packages() -> dict[str, str]:
    """Versions of all that is installed beside us."""
    found = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    return dict(sorted((str(name), version) for name, version in found.items()))


def running(server: Server) -> dict[str, Any]:
    """What the daemon says of itself, if one runs and lets us see it."""
    if not server.port or listener(server) != "ours":
        return {}
    paths = ("/health/ready", "/v1/models", "/v1/status", "/metrics")
    with daemon.client(server) as http:
        return {path: _answer(http, path) for path in paths}


def _changed(situation: Situation) -> dict[str, Any]:
    """Settings that are no defaults, by name. Of API keys only their number is told."""
    return {
        f"{section['name']}.{setting['name']}": setting["value"]
        for section in described(situation.settings, situation.sources)
        for setting in section["settings"]
        if f"{section['name']}.{setting['name']}" in situation.sources
    }


def _answer(http: httpx.Client, path: str) -> Any:
    """JSON as it is, text as lines; what went wrong if it did."""
    try:
        response = http.get(path)
    except httpx.HTTPError as error:
        return f"no answer ({type(error).__name__})"
    if not response.is_success:
        return f"status {response.status_code}"
    if response.headers.get("content-type", "").startswith("application/json"):
        return response.json()
    return [line for line in response.text.splitlines() if not line.startswith("# HELP")]
