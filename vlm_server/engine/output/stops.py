"""Stop strings in a stream of text."""

from __future__ import annotations


class StopChecker:
    """Emits text up to a stop string, and never a part of one.

    Text that may be the beginning of a stop string is held back. `reached` is the stop string
    found.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held_text = ""
        self.reached: str | None = None

    @property
    def has_any(self) -> bool:
        """Whether there are stop strings."""
        return bool(self._stops)

    def push(self, text: str) -> tuple[str, bool]:
        """(text to emit, whether a stop string was reached)."""
        if not self._stops:
            return text, False
        text = self._held_text + text
        matches = [
            (at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0
        ]
        if matches:
            self._held_text = ""
            # The stop string that was complete first, independent of how the text was split.
            _, start, self.reached = min(matches)
            return text[:start], True
        keep = self._possible_stop_length(text)
        self._held_text = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The text that was held back, at the end of the answer."""
        text, self._held_text = self._held_text, ""
        return text

    def _possible_stop_length(self, text: str) -> int:
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
