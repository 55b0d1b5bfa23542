"""The API key that a command sends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vlm_server.cli.failure import CommandFailed

if TYPE_CHECKING:
    from vlm_server.settings import Server


def read_key(path: Path) -> str:
    """The API key in a file. Raises CommandFailed if it can't be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise CommandFailed(f"can't read an API key from {path}") from None


def own_key(server: Server) -> str | None:
    """The first API key of the settings. Raises ConfigError if their key file can't be used."""
    from vlm_server.api.http.access import key_file

    if server.api_keys:
        return server.api_keys[0]
    if server.api_key_file:
        entries = key_file.read(Path(server.api_key_file).expanduser())
        return next(iter(entries.values())).key
    return None
