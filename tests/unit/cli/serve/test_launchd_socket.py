"""launch_activate_socket(3) is called as its manual says. No Mac has been asked yet."""

from __future__ import annotations

import ctypes
import errno
import sys
from typing import Any

import pytest

from vlm_server.cli.serve import listener
from vlm_server.errors import ConfigError


class FakeLibSystem:
    """Stands in for libSystem: launchd answers `code` and hands over `descriptors`."""

    def __init__(self, code: int, *descriptors: int) -> None:
        self.names: list[bytes] = []
        self.freed: list[int | None] = []
        self._code = code
        self._array = (ctypes.c_int * max(1, len(descriptors)))(*descriptors)
        self._count = len(descriptors)

        class Free:
            argtypes: Any = None

            def __call__(_, pointer: ctypes.c_void_p) -> None:
                self.freed.append(pointer.value)

        self.free = Free()

    def launch_activate_socket(self, name: bytes, descriptors: Any, count: Any) -> int:
        self.names.append(name)
        if not self._code:
            ctypes.cast(descriptors, ctypes.POINTER(ctypes.c_void_p))[0] = ctypes.addressof(
                self._array
            )
            ctypes.cast(count, ctypes.POINTER(ctypes.c_size_t))[0] = self._count
        return self._code


def test_launchd_descriptors_are_adopted_and_list_freed() -> None:
    library = FakeLibSystem(0, 7, 9)
    assert listener.activate("http", library) == [7, 9]
    assert library.names == [b"http"]
    assert len(library.freed) == 1
    assert library.freed[0]


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESRCH])
def test_launchd_without_socket_gives_no_descriptors(code: int) -> None:
    assert listener.activate("http", FakeLibSystem(code)) == []


def test_launchd_socket_error_is_reported() -> None:
    with pytest.raises(ConfigError, match="already"):
        listener.activate("http", FakeLibSystem(errno.EALREADY))


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has it")
def test_launchd_socket_is_refused_off_macos() -> None:
    with pytest.raises(ConfigError, match="only macOS"):
        listener.activate("http")
