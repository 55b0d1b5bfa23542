"""Secrets in a report, masked: known secrets, and text in the form of a secret."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from vlm_server.api.http.access import key_file
from vlm_server.api.http.tracing import ENDPOINT_VARIABLES
from vlm_server.cli.doctor.situation import Situation
from vlm_server.errors import ConfigError
from vlm_server.settings.paths import expand_home

MASK = "***"
_MIN_CHARS = 6
_MAX_BYTES = 1 << 20
_SECRET_NAME = re.compile(r"key|token|secret|passw|auth|credential|header|cookie", re.IGNORECASE)
_IS_COLLECTOR = re.compile(r"(^|\.)endpoint$")
_URL_PATH = re.compile(r"(?:\w*:?//)?[^/?#]*/+([^?#]*)")
_QUOTED = re.compile(r"\"([^\"\n]*)\"|'([^'\n]*)'")
_WORDS = re.compile(r"[a-z0-9]{1,16}([_-]+[a-z0-9]{1,16})+")
_MAX_DIGITS = 3
_COMMIT = re.compile(r"[0-9a-f]{40}")

_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"data:[^\s,;]*(;[^\s,;]*)*,\S+", re.IGNORECASE), f"data:{MASK}"),
    (re.compile(r"\b(bearer|basic)\s+[^\s'\"]+", re.IGNORECASE), rf"\1 {MASK}"),
    (re.compile(r"(?<=://)[^/\s'\"@]*@"), f"{MASK}@"),
    (re.compile(r"(?<=[^\s'\"])\?[^\s'\"]*=[^\s'\"]*"), f"?{MASK}"),
    (re.compile(r"\b(hf_|sk-|ghp_|xox[a-z]-)[A-Za-z0-9_-]{8,}"), MASK),
    (
        re.compile(
            r"\b([\w-]*(?:key|token|secret|passw(?:or)?d))(\s*[=:]\s*)(['\"]?)[^\s'\",]{4,}",
            re.IGNORECASE,
        ),
        rf"\1\2\3{MASK}",
    ),
)
_RUN = re.compile(r"[A-Za-z0-9+/_=-]{40,}")


class Redactor:
    """A mask for `secrets`, for text in the form of a secret, and for the user's home folder."""

    def __init__(self, secrets: Iterable[str], home: Path) -> None:
        long_secrets = {secret for secret in secrets if len(secret) >= _MIN_CHARS}
        self._known = sorted(long_secrets, key=len, reverse=True)
        self._home = str(home) if len(home.parts) > 1 else ""

    def text(self, text: str) -> str:
        """`text` with its secrets masked, and `~` for the home folder."""
        for secret in self._known:
            text = text.replace(secret, MASK)
        for pattern, replacement in _PATTERNS:
            text = pattern.sub(replacement, text)
        text = _RUN.sub(lambda run: run[0] if _is_harmless(run[0]) else MASK, text)
        return text.replace(self._home, "~") if self._home else text

    def value(self, value: Any) -> Any:
        """`value`, a JSON value, with the secrets in all its texts masked."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(name)): self.value(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(inner) for inner in value]
        return value


def known_secrets(situation: Situation, environment: Mapping[str, str] = os.environ) -> set[str]:
    """API keys of the settings, of the key file and of the environment; the hub's token; paths of
    collectors' URLs, which may have a token. Files may be broken.
    """
    secrets = set(situation.settings.server.api_keys)
    secrets.add(_path(situation.settings.tracing.endpoint))
    secrets |= {_path(environment.get(name, "")) for name in ENDPOINT_VARIABLES}
    secrets |= {value for name, value in environment.items() if _SECRET_NAME.search(name)}
    for text in (*situation.arguments.set, _read(situation.arguments.config)):
        secrets |= set(_in_settings(text))
    if file := situation.settings.server.api_key_file:
        secrets |= set(_in_key_file(expand_home(file)))
    secrets.add(_read(expand_home(constants.HF_TOKEN_PATH)).strip())
    return {secret for secret in secrets if len(secret) >= _MIN_CHARS}


def _in_settings(text: str) -> Iterator[str]:
    """Possible secrets in a settings file or an override, valid or not."""
    is_secret = False
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        quoted = [first or second for first, second in _QUOTED.findall(line)]
        if _IS_COLLECTOR.search(name.strip()):
            yield from map(_path, quoted or [value.strip()])
        if equals:
            is_secret = _SECRET_NAME.search(name) is not None and "file" not in name
        if is_secret:  # a list may span several lines
            yield from quoted
            if equals and not quoted:
                yield value.strip(" []")


def _path(url: str) -> str:
    """The path of a URL, which need not be a valid one."""
    match = _URL_PATH.match(url)
    return match[1].strip("/") if match else ""


def _in_key_file(path: Path) -> Iterator[str]:
    """The keys in the file; in an invalid file, all quoted words."""
    try:
        yield from (entry.key for entry in key_file.read(path).values())
    except ConfigError:
        yield from (first or second for first, second in _QUOTED.findall(_read(path)))


def _is_harmless(run: str) -> bool:
    """Whether `run` is a commit, a name of words, or a path: neither a key, nor long base64."""
    num_digits = sum(char.isdigit() for char in run)
    if _COMMIT.fullmatch(run) or (_WORDS.fullmatch(run) and num_digits <= _MAX_DIGITS):
        return True
    parts = run.split("/")
    return (
        len(parts) > 2
        and all(len(part) < 40 or _COMMIT.fullmatch(part) for part in parts)
        and (sum(any(char.isdigit() for char in part) for part in parts) < len(parts) / 2)
    )


def _read(path: Path | None) -> str:
    """The text of the file; empty if this user may read none."""
    if path is None:
        return ""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            return file.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
