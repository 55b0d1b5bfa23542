"""The keys that are typed while no prompt reads them."""

from __future__ import annotations

import contextlib
import sys
import termios
from collections.abc import Iterator


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """What is typed during a start or an answer waits unchanged, and not echoed, for the prompt."""
    try:
        before = termios.tcgetattr(sys.stdin)
    except (termios.error, ValueError, OSError):  # no terminal
        yield
        return
    quiet = [*before]
    quiet[0] &= ~termios.ICRNL
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
