"""Who has the port: nobody, a daemon of ours, or another program."""

from __future__ import annotations

import contextlib
import os
import pwd
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx

from vlm_server.cli.doctor.finding import Finding, ok, problem
from vlm_server.cli.doctor.runner import output_of
from vlm_server.cli.doctor.situation import Situation
from vlm_server.cli.serve import url_of
from vlm_server.cli.serving.listener import bind
from vlm_server.errors import ConfigError
from vlm_server.settings import Server, is_loopback

ANSWER_SECONDS = 5.0
_LISTENS = "0A"
"""The state in Linux's tables of sockets."""


def look(situation: Situation) -> list[Finding]:
    """One finding."""
    return [port(situation.settings.server)]


def port(server: Server) -> Finding:
    """Whether the daemon can listen where `server` says, or does so already."""
    if server.port == 0:
        return ok("port", "any that is free")
    where = f"{server.host}:{server.port}"
    state = listener(server)
    if state == "ours":
        return ok("port", f"{where}, a daemon answers there")
    if state == "free":
        return _bindable(server, where)
    who = owner(server.port)
    if state == "silent":
        advice = "it may be a daemon that hangs: see its log, then restart it (`service restart`)"
        return problem("port", f"{where} is taken by {who}, which does not answer", advice)
    advice = "end that program, or choose another port: server.port, or `serve --port`"
    return problem("port", f"{where} is taken by {who}", advice)


def listener(server: Server) -> str:
    """What answers there: `ours`, `foreign`, `silent`, or `free` if nobody does."""
    root = url_of(server.host, server.port).removesuffix("/v1")
    headers = host_header(server)
    try:
        response = httpx.get(
            f"{root}/health/live", headers=headers, timeout=ANSWER_SECONDS, trust_env=False
        )
        is_ours = response.is_success and response.json() == {"status": "live"}
    except httpx.ConnectError:
        return "free"
    except httpx.TimeoutException:
        return "silent"
    except (httpx.HTTPError, ValueError):
        return "foreign"
    return "ours" if is_ours else "foreign"


def host_header(server: Server) -> dict[str, str]:
    """What the daemon takes for its name, where that is not the address that we ask."""
    if not server.allowed_hosts or any(map(is_loopback, server.allowed_hosts)):
        return {}
    return {"Host": server.allowed_hosts[0]}


def owner(port: int) -> str:
    """The program that listens on `port`, as far as the system tells us."""
    if sys.platform == "darwin":
        said = output_of(("lsof", "-nP", f"-iTCP:{port}", "-sTCP:LISTEN", "-Fpc")) or ""
        return owner_in_lsof(said)
    sockets = dict(listening(port))
    for pid, inode in _open_sockets(set(sockets)):
        return f"{_name_of(pid)} (process {pid}, user {_user(sockets[inode])})"
    return f"a program of user {_user(next(iter(sockets.values())))}" if sockets else "a program"


def owner_in_lsof(said: str) -> str:
    """From the output of `lsof -Fpc`: `p` is the process's id, `c` its command."""
    fields = {line[0]: line[1:] for line in reversed(said.splitlines()) if line}
    if "p" not in fields:
        return "a program of another user"
    return f"{fields.get('c', 'a program')} (process {fields['p']})"


def listening(port: int, root: Path = Path("/")) -> Iterator[tuple[str, int]]:
    """Inode and user of each socket that listens on `port` (Linux)."""
    for name in ("tcp", "tcp6"):
        try:
            lines = (root / "proc/net" / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == _LISTENS and int(words[1].rpartition(":")[2], 16) == port:
                yield words[9], int(words[7])


def _bindable(server: Server, where: str) -> Finding:
    try:
        bind(server).close()
    except ConfigError as error:
        return problem("port", str(error), "set server.host and server.port to what this user may")
    return ok("port", f"{where} is free")


def _open_sockets(inodes: set[str]) -> Iterator[tuple[int, str]]:
    """Processes that we may look into, and which of the sockets they hold."""
    for process in Path("/proc").glob("[0-9]*"):
        for link in _links(process / "fd"):
            if (inode := link.removeprefix("socket:[").removesuffix("]")) in inodes:
                yield int(process.name), inode


def _links(folder: Path) -> Iterator[str]:
    """Where the links in `folder` lead, as far as they are there and may be seen."""
    with contextlib.suppress(OSError):
        for link in folder.iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                yield os.readlink(link)


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "a program"


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
