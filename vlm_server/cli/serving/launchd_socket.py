"""The sockets that launchd keeps open for a job: launch_activate_socket(3).

Not run on a Mac yet.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

from vlm_server.errors import ConfigError

_NONE = frozenset({errno.ENOENT, errno.ESRCH})
"""The job's file names no such sockets, or this process was not started by launchd."""


def activate(name: str, library: Any = None) -> list[int]:
    """The descriptors of the sockets `name` in the job's file; none if launchd has none for us.

    They can be had once in a process's life. `library` has launch_activate_socket: libSystem, if
    it is left out. Raises ConfigError.
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
    found = [descriptors[index] for index in range(count.value)]
    free = library.free
    free.argtypes = [ctypes.c_void_p]
    free(ctypes.cast(descriptors, ctypes.c_void_p))
    return found
