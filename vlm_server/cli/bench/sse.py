"""Reads server-sent events. Knows the wire format; knows nothing of what is sent."""

from __future__ import annotations


class EventReader:
    """Puts pieces of a stream, cut anywhere, together into the `data` of whole events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that `piece` completes. Comments and all fields but `data` are dropped."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
