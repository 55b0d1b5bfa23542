"""A fake terminal that records what is written to it."""

from __future__ import annotations

import io


class Terminal(io.StringIO):
    """A terminal of the size in the environment (COLUMNS); its value is all output so far."""

    def isatty(self) -> bool:
        return True
