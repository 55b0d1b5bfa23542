"""Program that a service runs: this installation's `vlm-server`, if it is permanent.

`uvx` and `pipx run` make an environment in a cache, and pip builds in a temporary folder; both may
be cleaned up at any time.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path

from vlm_server.cli.exit_codes import CommandFailed

NAME = "vlm-server"
_CACHE_TAG = "CACHEDIR.TAG"
"""File that uv and pipx put into their caches (bford.info/cachedir), and into environments."""
_CACHES = (".cache", "Library/Caches")
_TEMPORARY = (
    tempfile.gettempdir(),
    "/tmp",  # noqa: S108  named to be refused
    "/var/tmp",  # noqa: S108
    "/dev/shm",  # noqa: S108
    "/run/user",
    "/var/folders",
    "/private/tmp",
    "/private/var/folders",
    "/private/var/tmp",
)


def installed_program() -> Path:
    """A path for a service's file. Raises CommandFailed without a permanent one."""
    folders = [
        str(Path(sys.executable).absolute().parent),
        sysconfig.get_path("scripts"),
        sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user")),
    ]
    caches = [*(str(Path.home() / name) for name in _CACHES), os.environ.get("XDG_CACHE_HOME", "")]
    return permanent_program(find_program(folders), [*_TEMPORARY, *filter(None, caches)])


def permanent_program(program: Path, folders: Iterable[str]) -> Path:
    """The permanent path of `program`. Raises CommandFailed in one of `folders`, or in a cache."""
    throw_away = throw_away_folder(program, folders)
    if throw_away is not None:
        raise CommandFailed(
            f"a service can't run {program}: {throw_away} may be cleaned up at any time. Install "
            "vlm-server to stay, by 'uv tool install' or 'pipx install' of the same package, then "
            "run 'vlm-server service install' again"
        )
    return permanent_path(program)


def find_program(folders: Iterable[str]) -> Path:
    """`vlm-server` in the first of the folders that has it. Raises CommandFailed."""
    places = list(dict.fromkeys(folders))
    for folder in places:
        if (program := Path(folder) / NAME).is_file():
            return program
    raise CommandFailed(
        f"there is no {NAME} in {' or '.join(places)}: install vlm-server with 'uv tool install', "
        "'pipx install', or pip into an environment of its own"
    )


def throw_away_folder(program: Path, folders: Iterable[str]) -> Path | None:
    """Temporary folder around the environment of `program`: one of `folders`, or a cache.

    The environment itself may have a cache's tag, for backups. A clone's environment is permanent.
    """
    environment = program.parent.parent
    if (environment.parent / "pyproject.toml").is_file():
        return None
    temporary = {Path(folder) for folder in folders}
    for folder in (*environment.parents, *environment.resolve().parents):
        if folder in temporary or (folder / _CACHE_TAG).is_file():
            return folder
    return None


def permanent_path(program: Path) -> Path:
    """The permanent path of `program`: the link in Homebrew's `opt`, not a version in `Cellar`."""
    parts = program.parts
    if "Cellar" not in parts or len(parts) < (at := parts.index("Cellar")) + 4:
        return program
    stable_path = Path(*parts[:at], "opt", parts[at + 1], *parts[at + 3 :])
    return stable_path if stable_path.exists() else program
