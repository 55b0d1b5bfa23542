"""nginx and HAProxy in front of the daemons, with the files of configs/scale-out."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
from pathlib import Path

from scripts.scale_out import ARGUMENTS, get
from tests.scale.fleet import Daemons, Fleet

_CONFIGURATIONS = ARGUMENTS.parent
_PORT = 30000
_WORKER_PORTS = (8001, 8002)
_TOP = """\
daemon off;
user {user};
pid {folder}/pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/bodies;
    proxy_temp_path {folder}/answers;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/gateway.conf;
}}
"""


def find_proxy(name: str) -> str | None:
    """The path of the program, also from the folders that Debian reserves for administrators."""
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")


class _Proxy(Fleet):
    """A proxy whose configuration names two daemons by their addresses."""

    def __init__(self, daemons: Daemons, folder: Path, program: str) -> None:
        super().__init__(daemons, folder)
        self.program = program
        self.folder = folder

    def configuration(self, name: str) -> str:
        """The file of configs/scale-out with this test's addresses."""
        text = (_CONFIGURATIONS / name).read_text()
        ports = [daemon.port for daemon in self.daemons.values()]
        for old, new in zip((_PORT, *_WORKER_PORTS), (self.port, *ports), strict=True):
            assert text.count(f"127.0.0.1:{old}") == 1
            text = text.replace(f"127.0.0.1:{old}", f"127.0.0.1:{new}")
        return text


class Nginx(_Proxy):
    def command(self) -> list[str]:
        (self.folder / "gateway.conf").write_text(self.configuration("nginx.conf"))
        file = self.folder / "nginx.conf"
        file.write_text(_TOP.format(folder=self.folder, user=getpass.getuser()))
        return [self.program, "-p", str(self.folder), "-e", "stderr", "-c", str(file)]

    def is_before(self, number: int) -> bool:
        """Whether it answers for all daemons: nginx checks no worker in advance."""
        return number == len(self.daemons) and get(f"{self.url}/health/live") is not None


class HAProxy(_Proxy):
    def command(self) -> list[str]:
        file, more = self.folder / "haproxy.cfg", self.folder / "socket.cfg"
        file.write_text(self.configuration("haproxy.cfg"))
        more.write_text(f"global\n    stats socket {self._socket}\n")
        return [self.program, "-db", "-f", str(file), "-f", str(more)]

    @property
    def _socket(self) -> Path:
        return self.folder / "socket"

    def is_before(self, number: int) -> bool:
        """Whether the proxy's checks find the workers."""
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(self._socket))
            except OSError:
                return False
            connection.sendall(b"show stat\n")
            lines = connection.makefile().read().splitlines()
        rows = [line.split(",") for line in lines if line.startswith("workers,")]
        servers = [row for row in rows if row[1] != "BACKEND"]
        return sum(row[_STATUS].startswith("UP") for row in servers) == number


_STATUS = 17
"""The column of `show stat` that says UP or DOWN; `UP 1/2` is one that failed once."""
