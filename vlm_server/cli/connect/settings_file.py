"""A client's settings file, and the record of our change in it.

Links are followed, and a file is replaced as a whole, with its mode. The record is kept outside of
the folder of the client, which may be a public repository of dotfiles.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path

import msgspec

from vlm_server.cli.connect import tree
from vlm_server.cli.exit_codes import CommandFailed
from vlm_server.platform.private_folder import replace_file
from vlm_server.settings.paths import state_folder

_MAX_BYTES = 16 << 20


class Record(msgspec.Struct, frozen=True):
    """Our change: `before`, None without a file, became `written`, which has ours at `paths`.

    They lead to `url`.
    """

    file: str
    before: str | None
    written: str
    paths: tuple[tree.Path, ...]
    url: str = ""


def read(path: Path) -> str | None:
    """The text at `path`, with its ends of lines; None without a file. Raises CommandFailed."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CommandFailed(f"{path} is not a regular file; nothing was changed")
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise CommandFailed(f"{path} is too large for settings")
        return content.decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise CommandFailed(f"{path}, line {line}: it is not UTF-8; nothing was changed") from None


def target_of(path: Path) -> Path:
    """The file that `path` leads to, through links; it need not exist. Raises CommandFailed."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        raise CommandFailed(f"{path} is a link that leads nowhere") from None


def replace(path: Path, text: str | None) -> None:
    """Write the file, or remove it if `text` is None. Raises OSError, CommandFailed.

    An existing file keeps its mode; a new one is its owner's alone.
    """
    if text is None:
        path.unlink(missing_ok=True)
        return
    mode = 0o600
    with contextlib.suppress(FileNotFoundError):
        mode = path.stat().st_mode & 0o7777
        if not os.access(path, os.W_OK):
            raise CommandFailed(f"{path} is read-only; nothing was changed")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(path, text.encode(), mode)


class Records:
    """The records of one client's settings file, and beside them the file as it was."""

    def __init__(self, client: str, file: Path) -> None:
        digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
        self._folder = state_folder() / "connect" / f"{client}-{digest}"
        self._record = self._folder / "record.json"
        self.backup = self._folder / file.name

    def load(self) -> Record | None:
        """The record, if there is one. Raises CommandFailed."""
        if (text := read(self._record)) is None:
            return None
        try:
            return msgspec.json.decode(text, type=Record)
        except msgspec.DecodeError as error:
            raise CommandFailed(f"{self._record} is broken: {error}") from None

    def save(self, record: Record) -> None:
        """Keep `record`, and the file as it was. Raises OSError."""
        replace(self.backup, record.before)
        replace(self._record, msgspec.json.encode(record).decode())

    def remove(self) -> None:
        """Forget the change."""
        for path in (self.backup, self._record):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._folder.rmdir()
