"""Report for an issue: one file of JSON that can be read before it is sent, without secrets.

Only lines of known forms in the daemon's log are included, and only types and places of exceptions:
the daemon logs neither contents nor keys, but libraries might.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import msgspec

from vlm_server import __version__
from vlm_server.cli.doctor import daemon
from vlm_server.cli.doctor.daemon import listener
from vlm_server.cli.doctor.findings import Finding, output_of
from vlm_server.cli.doctor.secrets import Redactor, known_secrets
from vlm_server.cli.doctor.situation import Situation
from vlm_server.cli.exit_codes import CommandFailed
from vlm_server.cli.service.manager import ServiceManager
from vlm_server.platform.private_folder import replace_file
from vlm_server.settings import Server, describe_settings

_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "DYLD_INSERT_LIBRARIES", "HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE"),
    *("HF_HUB_OFFLINE", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LD_PRELOAD"),
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PATH", "PYTHONPATH", "TMPDIR", "VIRTUAL_ENV"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME"),
)
"""Environment variables that are included; other variables are not even named."""
_NOTE = (
    "Made by `vlm-server doctor --report`. It holds no prompts, pictures, answers or keys; "
    "paths and model names are in it. Read it before you send it."
)
NUM_LINES = 300
_MAX_BYTES = 1 << 20
_MAX_CHARS = 400
_LINE = re.compile(
    r"(?:\r?\x1b\[K)?(?P<start>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \w+ [A-Z]+ )(?P<message>.*)"
)
_MESSAGE = re.compile(r"(?P<start>vlm-server: )(?P<message>.*)")
_FRAME = re.compile(r"\s*File \"[^\"]+\", line \d+(,)? in [\w<>.]+")
_HEADING = re.compile(
    r"Traceback \(most recent call last\):|Fatal Python error: [\w ]+|"
    r"(Current t|T)hread 0x[0-9a-f]+.*\(most recent call first\):"
)
_ERROR = re.compile(r"(?P<type>[A-Za-z_][\w.]*(?:Error|Exception|Timeout|Interrupt|Exit))\b(:|$)")
_LONG_QUOTE = re.compile(r"'(?![/~])[^'\n]{25,}'|\"(?![/~])[^\"\n]{25,}\"")
_FIELDS = {
    *("time", "process", "level", "logger", "method", "route", "id", "status", "finish", "ms"),
    *("ttft_ms", "queue_ms", "prompt_tokens", "cached_tokens", "tokens", "images", "videos"),
    *("error", "key", "ignored"),
}
"""Fields of a JSON log line that are included with its message: names, counts and times."""


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Replace `path`, readable by its owner only. Raises CommandFailed."""
    text = json.dumps(report, indent=1, ensure_ascii=False)
    try:
        replace_file(path, f"{text}\n".encode())
    except OSError as error:
        raise CommandFailed(f"can't write {path}: {error.strerror}") from None


def contents(
    findings: Sequence[Finding], situation: Situation, log_path: Path | None
) -> dict[str, Any]:
    """The report, with secrets masked in all of its texts."""
    redactor = Redactor(known_secrets(situation), situation.home)
    report: dict[str, Any] = redactor.value(
        {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "version": __version__,
            "platform": platform.platform(),
            "findings": msgspec.to_builtins(list(findings)),
            "settings": {"from": situation.origin, "changed": _changed_settings(situation)},
            "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
            "packages": packages(),
            "daemon": daemon_answers(situation.settings.server),
            "log": presentable(tail(log_path, situation.service)),
        }
    )
    return {"note": _NOTE, **report}


def packages() -> dict[str, str]:
    """The versions of all installed distributions, by name."""
    versions = {
        str(package.metadata["Name"]): package.version for package in metadata.distributions()
    }
    return dict(sorted(versions.items()))


def daemon_answers(server: Server) -> dict[str, Any]:
    """The answers of the running daemon about itself, by path; empty if none runs."""
    if not server.port or listener(server) != "ours":
        return {}
    paths = ("/health/ready", "/v1/models", "/v1/status", "/metrics")
    with daemon.client(server) as http:
        return {path: _answer(http, path) for path in paths}


def _changed_settings(situation: Situation) -> dict[str, Any]:
    """The settings that were given, by name; API keys as their number only."""
    return {
        name: setting["value"]
        for section in describe_settings(situation.settings, situation.sources)
        for setting in section["settings"]
        if (name := f"{section['name']}.{setting['name']}") in situation.sources
    }


def _answer(http: httpx.Client, path: str) -> Any:
    """Answer at `path`: JSON unchanged, text as lines, or an error message."""
    try:
        response = http.get(path)
    except httpx.HTTPError as error:
        return f"no answer ({type(error).__name__})"
    if not response.is_success:
        return f"status {response.status_code}"
    if response.headers.get("content-type", "").startswith("application/json"):
        return response.json()
    return [line for line in response.text.splitlines() if not line.startswith("# HELP")]


def tail(path: Path | None, service: ServiceManager) -> list[str]:
    """The end of the log at `path`, or of the service's."""
    if path is None:
        return (output_of(service.log_command(NUM_LINES, follow=False)) or "").splitlines()
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _MAX_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def presentable(lines: Iterable[str]) -> list[str]:
    """The last `NUM_LINES` lines of known forms, without possible contents."""
    presentable_lines, left_out = [], 0
    for line in lines:
        presentable_line = _taken(line)
        if presentable_line is None:
            left_out += bool(line.strip())
        else:
            presentable_lines.append(presentable_line[:_MAX_CHARS])
    if left_out:
        presentable_lines.append(f"({left_out} lines of other forms are left out)")
    return presentable_lines[-NUM_LINES:]


def _taken(line: str) -> str | None:
    if line.startswith("{"):
        return _of_json(line)
    if match := _LINE.fullmatch(line) or _MESSAGE.fullmatch(line):
        return match["start"] + _without_quotes(match["message"])
    if match := _FRAME.match(line) or _HEADING.match(line):
        return match[0]
    if match := _ERROR.match(line):
        return match["type"]
    return None


def _of_json(line: str) -> str | None:
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    if not (isinstance(fields, dict) and {"time", "process", "level", "message"} <= fields.keys()):
        return None
    presentable_fields = {name: value for name, value in fields.items() if name in _FIELDS}
    presentable_fields["message"] = _without_quotes(str(fields["message"]))
    if trace := fields.get("exception"):
        presentable_fields["exception"] = list(_of_trace(str(trace).splitlines()))
    return json.dumps(presentable_fields)


def _of_trace(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        if match := _FRAME.match(line):
            yield match[0].strip()
        elif match := _ERROR.match(line):
            yield match["type"]


def _without_quotes(message: str) -> str:
    """`message` without long quotes, which may be a client's words unless they are paths."""
    return _LONG_QUOTE.sub("'…'", message)
