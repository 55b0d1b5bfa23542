"""TCP ports for tests that can't leave the choice to the system."""

from __future__ import annotations

import random
import socket

_FIRST, _END = 20_000, 32_000
"""Below the ports that systems assign to connections."""


def free_ports(count: int) -> int:
    """The first of `count` free ports in a row."""
    while True:
        first = random.randrange(_FIRST, _END)
        if all(_is_free(port) for port in range(first, first + count)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
