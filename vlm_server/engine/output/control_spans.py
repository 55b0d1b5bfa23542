"""Where control tokens stand in an answer's text: they may be marks, and are never shown."""

from __future__ import annotations

from collections import deque


class ControlSpans:
    """The places of control tokens, in characters from the beginning of the answer's raw text."""

    def __init__(self) -> None:
        self._spans: deque[tuple[int, int]] = deque()

    def add(self, start: int, end: int) -> None:
        """Note one more, which must come after all others."""
        self._spans.append((start, end))

    def strip(self, text: str, start: int) -> str:
        """`text`, which begins at `start`, without control tokens. Later calls must not go back."""
        while self._spans and self._spans[0][1] <= start:
            self._spans.popleft()
        end, kept, at = start + len(text), [], start
        for first, last in self._spans:
            if first >= end:
                break
            kept.append(text[at - start : max(first, at) - start])
            at = min(last, end)
        return "".join(kept) + text[at - start :] if kept else text
