"""The API key that a command sends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vlm_server.cli.failure import CommandFailed

if TYPE_CHECKING:
    from vlm_server.settings import Server


def read_key(path: Path) -> str:
    """The API key in a file. Raises CommandFailed if it can't be read, or holds something else."""
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise CommandFailed(f"can't read an API key from {path}") from None
    if not key.isprintable() or " " in key:
        raise CommandFailed(f"what {path} holds is not an API key alone")
    return key


def authorization(key: str | None) -> dict[bytes, bytes]:
    """The header that shows `key` to a daemon, which reads it as UTF-8."""
    return {b"Authorization": f"Bearer {key}".encode()} if key else {}


def own_key(server: Server) -> str | None:
    """The first API key of the settings. Raises ConfigError if their key file can't be used."""
    from vlm_server.api.http.access import key_file
    from vlm_server.settings.paths import expanded

    if server.api_keys:
        return server.api_keys[0]
    if server.api_key_file:
        entries = key_file.read(expanded(server.api_key_file))
        return next(iter(entries.values())).key
    return None
