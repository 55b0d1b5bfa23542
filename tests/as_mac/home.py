"""A user's home on something like a Mac: `vlm-server` in a clone there, launchd, TMPDIR."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.as_mac.launchd import SOFT_FILES, Launchd, launchd
from tests.support.daemons import SCRIPTED

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_COMPILER = "cc"


def missing() -> str | None:
    """Why there can be none here."""
    if sys.platform != "linux":
        return "macOS has all of it"
    return None if shutil.which(_COMPILER) else "needs a C compiler"


@dataclass(frozen=True)
class MacHome:
    """home: the folder. launchd: of its user. environment: that of the user's terminal."""

    home: Path
    launchd: Launchd
    environment: dict[str, str]

    @property
    def log(self) -> Path:
        return self.home / "Library/Logs/vlm-server.log"

    @property
    def plist(self) -> Path:
        return self.home / "Library/LaunchAgents/org.vlm-server.daemon.plist"

    def run(self, *words: str, timeout: float = 180.0) -> subprocess.CompletedProcess[str]:
        """`vlm-server WORDS`."""
        return subprocess.run(
            [*self._limited, str(self._python), "-m", "vlm_server.cli", *words],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )

    @property
    def _python(self) -> Path:
        return self.home / "clone/.venv/bin/python"

    @property
    def _limited(self) -> list[str]:
        return ["sh", "-c", f'ulimit -Sn {SOFT_FILES}; exec "$@"', "sh"]


@contextmanager
def mac_home(folder: Path, *, has_screen: bool = True) -> Iterator[MacHome]:
    """The home, and no trace of it afterwards. The installed program's engines are scripted."""
    home = folder / "Users/me"
    _install(home / "clone/.venv")
    (folder / "var/T").mkdir(parents=True)
    temporary = folder / "T"
    temporary.symlink_to(folder / "var/T")
    imported = [str(_HERE / "site"), str(_ROOT), *site.getsitepackages()]
    environment = {
        "HOME": str(home),
        "TMPDIR": str(temporary),
        "PYTHONPATH": os.pathsep.join(imported),
        "LANG": "C.UTF-8",
    }
    with tempfile.TemporaryDirectory() as short:  # as a socket's path has to be
        of_jobs = {**environment, "LD_PRELOAD": str(_library(Path(short)))}
        path = os.pathsep.join([short, "/usr/bin", "/bin"])
        with launchd(Path(short), of_jobs, has_screen=has_screen) as system:
            yield MacHome(home, system, {**environment, "PATH": path})


def _install(environment: Path) -> None:
    """An environment in a clone, with our packages by PYTHONPATH alone."""
    programs, python = environment / "bin", Path(sys.executable).resolve()
    programs.mkdir(parents=True)
    (environment.parent / "pyproject.toml").touch()
    (environment / "pyvenv.cfg").write_text(
        f"home = {python.parent}\ninclude-system-site-packages = false\n"
    )
    (programs / "python").symlink_to(python)
    program = programs / "vlm-server"
    program.write_text(f'#!/bin/sh\nexec "{programs}/python" -m {SCRIPTED} "$@"\n')
    program.chmod(0o755)


def _library(folder: Path) -> Path:
    """launch_activate_socket(3), compiled."""
    made, source = folder / "activate.so", _HERE / "activate.c"
    words = [_COMPILER, "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(made), str(source)]
    subprocess.run(words, check=True)
    return made
