"""Where a wheel is tried: an empty environment of this machine, or one in an empty Debian root."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from scripts.release.artifacts import CheckFailed
from scripts.release.questions import wait_ready

OVERRIDES = Path(__file__).parents[2] / "packaging/overrides.txt"
OF_INSTALLERS = ("PIP_", "UV_", "SSL_CERT_")
PACKAGES = "python3,python3-venv,ca-certificates"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
ENTER = 'mount -t proc proc "$0/proc"; mount --rbind /dev "$0/dev"; exec chroot "$0" "$@"'


class Times(NamedTuple):
    """Seconds from an empty machine with Python to an answer."""

    install: float
    """With nothing in the installer's cache."""
    ready: float
    answer: float
    cpu: float
    """Of all processors together, for the whole: what a busy machine does not change much."""
    again: float
    """Of another installation, from the installer's cache."""

    @property
    def whole(self) -> float:
        return self.install + self.ready + self.answer


@dataclass
class Place:
    """A folder in which environments are made; `root` is the Debian root around it, if any."""

    folder: Path
    version: str
    index: str
    """The address of the index that has the version."""
    python: str = sys.executable
    root: Path | None = None
    by_uv: bool = False
    """Install by uv, without what no request needs; else by pip."""
    number: int = field(default=0)

    @property
    def environment(self) -> Path:
        """The last one."""
        return self._outside(f"env{self.number}")

    def refuses_without_backend(self) -> None:
        """On Linux, without an extra. Raises CheckFailed if `serve` does not say which to take."""
        program = self._install("vlm-server")
        ended = subprocess.run(
            self._words(program, "serve", "--port", "0"),
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        said = ended.stderr.strip()
        if sys.platform == "linux" and (
            ended.returncode != 3 or "\n" in said or "vlm-server[cpu]" not in said
        ):
            raise CheckFailed(f"without a backend, 'serve' ended with {ended.returncode}: {said}")
        print(f"without an extra: {said}")

    def timed(self, ask: Callable[[int], None]) -> Times:
        """Install, serve, ask; then install once more. Raises CheckFailed."""
        shutil.rmtree(self._outside("home"), ignore_errors=True)  # with the installer's cache
        self._outside("home").mkdir()
        began, used = time.monotonic(), cpu_seconds()
        program = self._install("vlm-server[cpu]")
        installed = time.monotonic()
        with self._serving(program) as (port, process):
            wait_ready(port, process)
            ready = time.monotonic()
            ask(port)
            answered = time.monotonic()
        seconds = (installed - began, ready - installed, answered - ready, cpu_seconds() - used)
        said = self._run(program, "--version").strip()
        if said != f"vlm-server {self.version}":
            raise CheckFailed(f"--version says {said!r}, not {self.version}")
        print(f"{said} takes {size_bytes(self.environment) / 1e6:.0f} MB")
        began = time.monotonic()
        self._install("vlm-server[cpu]")
        times = Times(*seconds, time.monotonic() - began)
        print("  ".join(f"{step} {seconds:.1f} s" for step, seconds in times._asdict().items()))
        return times

    def _install(self, package: str) -> str:
        """The program `vlm-server` of a new environment. The one before is removed."""
        shutil.rmtree(self._outside(f"env{self.number}"), ignore_errors=True)
        self.number += 1
        environment = self._inside(f"env{self.number}")
        self._run(self.python, "-m", "venv", environment)
        pip = [f"{environment}/bin/pip", "install", "--quiet", "--extra-index-url", self.index]
        if self.by_uv:
            pip = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--index", self.index]
            pip += ["--python", environment, "--overrides", str(OVERRIDES)]
        self._run(*pip, f"{package}=={self.version}")
        return f"{environment}/bin/vlm-server"

    @contextlib.contextmanager
    def _serving(self, program: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
        """A daemon that was started in an empty folder, with an environment without our things."""
        (empty := self._outside(f"empty{self.number}")).mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        with (self.folder / "daemon.log").open("wb") as log:
            process = subprocess.Popen(
                self._words(program, "serve", "--port", str(port)),
                cwd=empty,
                env=self._environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            yield port, process
        except CheckFailed as failure:
            raise CheckFailed(f"{failure}\n{(self.folder / 'daemon.log').read_text()}") from None
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)

    def _run(self, *words: str) -> str:
        ended = subprocess.run(
            self._words(*words), env=self._environment(), capture_output=True, text=True
        )
        if ended.returncode:
            raise CheckFailed(
                f"'{' '.join(words)}' failed:\n{(ended.stdout + ended.stderr)[-4000:]}"
            )
        return ended.stdout

    def _words(self, *words: str) -> list[str]:
        if self.root is None:
            return list(words)
        enter = ["unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER]
        return [*enter, str(self.root), *words]

    def _environment(self) -> dict[str, str]:
        """Of ours, only what says where packages come from."""
        kept = {name: value for name, value in os.environ.items() if name.startswith(OF_INSTALLERS)}
        kept |= {
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": self._inside("home"),
        }
        if self.root is not None and CERTIFICATES.exists():
            kept["PIP_CERT"] = "/certificates.crt"
        return kept

    def _outside(self, name: str) -> Path:
        return self.folder / name

    def _inside(self, name: str) -> str:
        path = self.folder / name
        return str(path) if self.root is None else f"/{path.relative_to(self.root)}"


def size_bytes(folder: Path) -> int:
    """Of all files in it."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def cpu_seconds() -> float:
    """Of the processes that we started and that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextlib.contextmanager
def place(
    suite: str | None, scratch: Path, version: str, index: str, *, by_uv: bool
) -> Iterator[Place]:
    """On this machine, or in an empty root of the Debian `suite`. Raises CheckFailed."""
    if suite is None:
        folder = scratch / "here"
        (folder / "home").mkdir(parents=True)
        yield Place(folder, version, index, by_uv=by_uv)
        return
    if os.geteuid() or shutil.which("mmdebstrap") is None:
        raise CheckFailed("--debian needs root, and mmdebstrap: 'apt install mmdebstrap'")
    root = scratch / "debian"
    words = ["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", suite, str(root)]
    if (ended := subprocess.run(words, capture_output=True, text=True)).returncode:
        raise CheckFailed(f"mmdebstrap failed: {ended.stderr[-2000:]}")
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    if CERTIFICATES.exists():
        shutil.copy(CERTIFICATES, root / "certificates.crt")
    folder = root / "srv"
    (folder / "home").mkdir(parents=True)
    yield Place(folder, version, index, "/usr/bin/python3", root)
