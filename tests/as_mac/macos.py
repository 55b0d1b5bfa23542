"""Makes Linux look like macOS to a Python process, where the daemon asks or depends on it.

What a Mac lacks is taken away, what it does otherwise is done so. The standard library is imported
before: it would go by the name of the system, too.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import multiprocessing.connection
import multiprocessing.popen_fork
import os
import platform
import resource
import select
import selectors
import shutil
import socket
import ssl
import subprocess
import sys
import sysconfig
import tempfile
import urllib.request
import uuid
from pathlib import Path
from typing import Any

from tests.as_mac import in_flight

_IMPORTED = (asyncio, multiprocessing, shutil, ssl, subprocess, tempfile, urllib.request, uuid)
MAX_FILES = 61_440
"""`kern.maxfilesperproc`."""
SOFT_FILES = 256
_PAIR_BYTES = 8192
"""Of a Unix socket: `net.local.stream.sendspace`."""
_KEEP_IDLE_SECONDS = 7200
_LIBPROC = "/usr/lib/libproc.dylib"
_ABSENT = ("/proc/", "/sys/")

_real_cdll = ctypes.CDLL
_is_system = False
"""While the stand-in itself asks Linux."""


def install() -> None:
    """Make this process take the system for macOS, to its end."""
    sysconfig.get_config_vars()  # reads a file that is named after the system
    sys.platform = "darwin"
    platform.system = lambda: "Darwin"
    platform.machine = lambda: "arm64"
    platform.mac_ver = lambda *_: ("14.5", ("", "", ""), "arm64")
    _take_away(
        os, "sched_getaffinity", "sched_setaffinity", "pidfd_open", "eventfd", "memfd_create"
    )
    _take_away(fcntl, "F_SETPIPE_SZ", "F_GETPIPE_SZ")
    _take_away(select, "epoll")
    _take_away(selectors, "EpollSelector")
    selectors.DefaultSelector = selectors.PollSelector
    _take_away(resource, "prlimit")
    _limit_files()
    _change_sockets()
    in_flight.install()
    ctypes.CDLL = library  # type: ignore[misc,assignment]
    sys.addaudithook(_refuse_absent)


def _take_away(module: Any, *names: str) -> None:
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


def _limit_files() -> None:
    """256 at first, in name no end to them, and an error beyond what the kernel has."""
    real_get, real_set = resource.getrlimit, resource.setrlimit
    _, hard = real_get(resource.RLIMIT_NOFILE)

    def getrlimit(kind: int) -> tuple[int, int]:
        limits = real_get(kind)
        return (limits[0], resource.RLIM_INFINITY) if kind == resource.RLIMIT_NOFILE else limits

    def setrlimit(kind: int, limits: tuple[int, int]) -> None:
        if kind == resource.RLIMIT_AS:
            return  # taken, and not obeyed
        if kind == resource.RLIMIT_NOFILE:
            if not 0 <= limits[0] <= MAX_FILES:
                raise ValueError("current limit exceeds maximum limit")
            limits = min(limits[0], hard), hard
        real_set(kind, limits)

    resource.getrlimit, resource.setrlimit = getrlimit, setrlimit


def _change_sockets() -> None:
    """Options that are other ones there, connections that do not inherit, and small buffers."""
    keep_idle = socket.TCP_KEEPIDLE
    for module in (socket, socket._socket):  # type: ignore[attr-defined]
        _take_away(module, "SO_PEERCRED", "TCP_KEEPIDLE", "TCP_USER_TIMEOUT", "SO_REUSEPORT_LB")
        module.TCP_KEEPALIVE = keep_idle
    kind = socket.socket
    real_get, real_accept, real_pair = kind.getsockopt, kind.accept, socket.socketpair

    def getsockopt(self: socket.socket, level: int, option: int, *size: int) -> Any:
        if (level, option) == (socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise OSError(errno.ENOPROTOOPT, "Protocol not available")
        return real_get(self, level, option, *size)

    def accept(self: socket.socket) -> tuple[socket.socket, Any]:
        connection, address = real_accept(self)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, keep_idle, _KEEP_IDLE_SECONDS)
        return connection, address

    def socketpair(*arguments: Any, **options: Any) -> tuple[socket.socket, socket.socket]:
        pair = real_pair(*arguments, **options)
        for end in pair:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PAIR_BYTES)
        return pair

    kind.getsockopt = getsockopt  # type: ignore[method-assign,assignment]
    kind.accept = accept  # type: ignore[method-assign]
    socket.socketpair = socketpair


def _refuse_absent(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse to open /proc and /sys, which macOS does not have."""
    if event not in ("open", "os.listdir", "os.scandir") or _is_system:
        return
    path = arguments[0]
    if isinstance(path, (str, bytes)) and os.fsdecode(path).startswith(_ABSENT):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def library(name: Any, *arguments: Any, **options: Any) -> Any:
    return _Libproc if name == _LIBPROC else _real_cdll(name, *arguments, **options)


class _Libproc:
    """proc_pid_rusage(3), of which only the footprint is true."""

    @staticmethod
    def proc_pid_rusage(pid: int, _flavor: int, info: Any) -> int:
        global _is_system
        _is_system = True
        try:
            words = Path(f"/proc/{pid}/statm").read_text().split()
        except OSError:
            ctypes.set_errno(errno.ESRCH)
            return -1
        finally:
            _is_system = False
        info._obj.ri_phys_footprint = (int(words[1]) - int(words[2])) * os.sysconf("SC_PAGE_SIZE")
        return 0
