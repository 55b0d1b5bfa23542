"""The sockets that `serve` listens on: bound here, or inherited from a service manager.

systemd, and `serve` itself when it starts again, hand sockets over by sd_listen_fds(3); launchd by
launch_activate_socket(3), not yet run on a Mac.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import ipaddress
import logging
import os
import socket
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from vlm_server.cli.port_owner import owner
from vlm_server.errors import ConfigError, NotAvailable
from vlm_server.settings import Server, is_loopback

logger = logging.getLogger(__name__)

BACKLOG = 2048
_SEND_BUFFER_BYTES = 256 * 1024
"""The system's send buffer of a connection, which inherits it from the listener."""
_PROBE_SECONDS = 1.0
_FIRST = 3
"""First descriptor that is handed over."""
_MOST = 16
_ABOVE = 64
"""Lowest descriptor for sockets kept out of the way during the handover."""

_PASSING = (
    *(errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.ENETDOWN, errno.ENETUNREACH),
    socket.EAI_AGAIN,
)
"""Errors of an address in use, or not up yet."""
_NONE = (errno.ENOENT, errno.ESRCH)
"""Errors of a job without such sockets, or of a process that launchd did not start."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Listening sockets. Inherited ones stay open in `kept` for the next program."""

    sockets: tuple[socket.socket, ...]
    kept: tuple[socket.socket, ...] = ()

    @property
    def is_inherited(self) -> bool:
        return bool(self.kept)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """The host and port of each socket."""
        return [_address(sock) for sock in self.sockets]

    def hand_over(self, environment: MutableMapping[str, str]) -> None:
        """Give `kept` to the program that this process becomes by `exec`."""
        high = [fcntl.fcntl(sock, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for sock in self.kept]
        for number, descriptor in enumerate(high, start=_FIRST):
            os.dup2(descriptor, number, inheritable=True)
        if high:
            environment["LISTEN_FDS"] = str(len(high))
            environment["LISTEN_PID"] = str(os.getpid())


def listen(server: Server, environment: MutableMapping[str, str], launchd: str | None) -> Listener:
    """The sockets that were handed over, else one bound to `server.host` and `server.port`.

    `launchd` is the name of the sockets in a LaunchAgent's file. Raises ConfigError for unusable
    settings or sockets, and for inherited sockets that other machines can reach without a key;
    NotAvailable if the address may be usable later.
    """
    descriptors = _descriptors(environment) or (activate(launchd) if launchd else [])
    if not descriptors:
        return Listener((bind(server),))
    duplicates = tuple(_adopt(descriptor) for descriptor in descriptors)
    listener = Listener(tuple(sock.dup() for sock in duplicates), duplicates)
    check_exposure(server, listener)
    return listener


def check_exposure(server: Server, listener: Listener) -> None:
    """Raises ConfigError if other machines can reach an inherited socket, and need no key."""
    for host, port in listener.addresses if listener.is_inherited else ():
        if not is_loopback(host) and not server.needs_key:
            raise ConfigError(
                f"the inherited socket {host}:{port} can be reached from other machines: "
                "set server.api_key_file or server.api_keys, or listen on 127.0.0.1"
            )


def with_inherited_address(server: Server, listener: Listener) -> Server:
    """`server` with the address of `listener`, and a warning, if it inherited another address."""
    if not listener.is_inherited or is_at(server, listener.addresses):
        return server
    host, port = listener.addresses[0]
    logger.warning(
        "listening on %s:%d, the socket that the service manager keeps open, and not on %s:%d as "
        "the settings say: 'vlm-server service install' moves it",
        *(host, port, server.host, server.port),
    )
    return msgspec.structs.replace(server, host=host, port=port)


def is_at(server: Server, addresses: Sequence[tuple[str, int]]) -> bool:
    """Whether the address in the settings is one of `addresses`."""
    try:
        return (numeric(server.host), server.port) in addresses
    except OSError:
        return False


def numeric(host: str) -> str:
    """IP address of `host`; a name is looked up, IPv4 first. Raises OSError if it is unknown."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError:  # an empty part, or one too long
        raise socket.gaierror(socket.EAI_NONAME, "it is no host's name") from None
    return str(min(addresses, key=lambda each: each[0] != socket.AF_INET)[4][0])


def bind(server: Server) -> socket.socket:
    """Listening socket. Raises ConfigError, NotAvailable if the address may be usable later.

    The protocol is set to TCP, unlike in `socket.create_server`: only then does asyncio set
    TCP_NODELAY. Without it the deltas of a stream are delayed by up to 40 ms.
    """
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        _check_nobody_answers(family, server)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        listener.bind((server.host, server.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        kind = NotAvailable if error.errno in _PASSING else ConfigError
        address = f"{server.host}:{server.port}"
        raise kind(f"can't listen on {address}: {_explain(error, server)}") from None
    return listener


def _explain(error: OSError, server: Server) -> str:
    """Why `server` can't listen, and what to do."""
    if error.errno == errno.EADDRINUSE:
        name = owner(server.port)
        ours = ", which 'vlm-server ps' shows" if name.startswith("vlm-server") else ""
        return f"it is in use by {name}{ours}; end that, or choose another port with --port"
    if error.errno == errno.EACCES:
        return "this user may not; choose a port from 1024 on with --port"
    return f"{str(error.strerror).partition(' (')[0]}; choose with --host and --port"


def _check_nobody_answers(family: socket.AddressFamily, server: Server) -> None:
    """Raises OSError, EADDRINUSE, if another program answers at the address.

    With SO_REUSEADDR, macOS binds 127.0.0.1:8000 despite another program's *:8000 without an error.
    """
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_SECONDS)
        is_open = server.port and probe.connect_ex((server.host, server.port)) == 0
        if is_open and probe.getsockname() != probe.getpeername():  # else connected to itself
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _descriptors(environment: MutableMapping[str, str]) -> list[int]:
    """The descriptors handed to this process; no child reads their variables."""
    count, pid = environment.pop("LISTEN_FDS", ""), environment.pop("LISTEN_PID", "")
    environment.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()):
        return []
    if not (count.isdecimal() and int(count) <= _MOST):
        raise ConfigError(f"LISTEN_FDS is {count!r}, not a number of at most {_MOST}")
    return list(range(_FIRST, _FIRST + int(count)))


def _adopt(descriptor: int) -> socket.socket:
    try:
        os.set_inheritable(descriptor, False)
        with socket.socket(fileno=os.dup(descriptor)) as probe:
            family, kind = probe.family, probe.type
            is_listening = _is_listening(probe)
    except OSError:
        is_listening, family, kind = False, socket.AF_UNSPEC, socket.SOCK_STREAM
    is_tcp = family in (socket.AF_INET, socket.AF_INET6) and kind == socket.SOCK_STREAM
    if not (is_tcp and is_listening):
        raise ConfigError(f"the inherited descriptor {descriptor} is no listening TCP socket")
    adopted = socket.socket(family, kind, socket.IPPROTO_TCP, fileno=descriptor)
    adopted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    return adopted


def _is_listening(probe: socket.socket) -> bool:
    """Whether a TCP socket accepts connections. Raises OSError if it is no socket.

    macOS can't tell (XNU has no SO_ACCEPTCONN), and an accept would take a client's connection:
    there, a socket with an address and without a peer counts as listening.
    """
    try:
        return bool(probe.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
    try:
        probe.getpeername()
    except OSError as error:
        return error.errno == errno.ENOTCONN and _address(probe)[1] != 0
    return False


def _address(listener: socket.socket) -> tuple[str, int]:
    host, port = listener.getsockname()[:2]
    return str(host), int(port)


def activate(name: str, library: Any = None) -> list[int]:
    """The descriptors of the sockets `name` in this job's file of launchd; available once.

    `library` has launch_activate_socket, libSystem by default. Raises ConfigError.
    """
    library = library or ctypes.CDLL(None)
    descriptors = ctypes.POINTER(ctypes.c_int)()
    count = ctypes.c_size_t()
    try:
        call = library.launch_activate_socket
    except AttributeError:
        raise ConfigError("--launchd-socket: only macOS has launchd") from None
    code = call(name.encode(), ctypes.byref(descriptors), ctypes.byref(count))
    if code in _NONE:
        return []
    if code:
        raise ConfigError(f"launchd does not hand over the socket {name!r}: {os.strerror(code)}")
    sockets_found = [descriptors[index] for index in range(count.value)]
    library.free.argtypes = [ctypes.c_void_p]
    library.free(ctypes.cast(descriptors, ctypes.c_void_p))
    return sockets_found
