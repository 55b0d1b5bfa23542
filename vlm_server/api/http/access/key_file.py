"""The file of API keys: its format, its permissions, and reading it again when it changes.

One table per key, by its name:

    [laptop]
    key = "..."
    max_requests = 4  # in flight; any number if left out

    [operator]
    key = "..."
    admin = true  # may see status, settings and metrics, and manage requests, models and caches

Messages show only the file's path: a name may be a key in the wrong place.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from vlm_server.errors import ConfigError
from vlm_server.settings import fault_of_key

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file. `max_requests` limits the requests in flight; None is no limit."""

    key: str
    admin: bool = False
    max_requests: Annotated[int, Meta(ge=1)] | None = None


def read(path: Path) -> dict[str, KeyEntry]:
    """The keys in the file by their names, at least one. Raises ConfigError."""
    try:
        table = tomllib.loads(_read_private(path).decode())
    except OSError as error:
        raise ConfigError(f"can't read the API keys in {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML{_position(error)}") from None
    if not table:
        raise ConfigError(f"{path} has no API keys")
    entries = {
        name: _entry(name, fields, f"{path}: key {i}")
        for i, (name, fields) in enumerate(table.items(), start=1)
    }
    if len({entry.key for entry in entries.values()}) < len(entries):
        raise ConfigError(f"{path}: two names have the same key")
    return entries


class WatchedKeyFile:
    """A key file that is read again when it changes; its content is not kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version: tuple[int, ...] | None = None

    def read(self) -> dict[str, KeyEntry]:
        """The keys by their names. Raises ConfigError."""
        self._version = _version(self._path)
        return read(self._path)

    def read_if_changed(self) -> dict[str, KeyEntry] | None:
        """The keys by name; None if the file is unchanged, or unusable, which is logged."""
        if _version(self._path) == self._version:
            return None
        try:
            entries = self.read()
        except ConfigError as error:
            logger.error("%s; the API keys read before stay valid", error)
            return None
        logger.info("the file of API keys has changed: it has %d", len(entries))
        return entries


def _read_private(path: Path) -> bytes:
    """The file's bytes. Raises OSError, and ConfigError unless only this user can access it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} is not a regular file")
        if status.st_uid not in (os.geteuid(), 0):
            raise ConfigError(f"{path} belongs to another user")
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f"{path} is open to other users: run chmod 600 on it")
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    return data


def _entry(name: str, fields: object, where: str) -> KeyEntry:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: its name must be 1 to 64 of a-z, A-Z, 0-9, '_', '-', '.', '@'")
    if not isinstance(fields, dict):
        raise ConfigError(f'{where}: must be a table: [name], then key = "..."')
    if fields.keys() - set(KeyEntry.__struct_fields__):
        raise ConfigError(f"{where}: has a field other than key, admin and max_requests")
    try:
        entry = msgspec.convert(fields, KeyEntry)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {str(error).replace('`$.', '`')}") from None
    if fault := fault_of_key(entry.key):
        raise ConfigError(f"{where}: {fault}")
    return entry


def _position(error: Exception) -> str:
    """The position in tomllib's message, whose rest may quote the file."""
    match = re.search(r" \(at (line \d+, column \d+|end of document)\)$", str(error))
    return f", {match[1]}" if match else ""


def _version(path: Path) -> tuple[int, ...] | None:
    """A value that changes with the file, its mode and its owner; None if it can't be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
