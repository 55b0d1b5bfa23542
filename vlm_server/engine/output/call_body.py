"""What stands between the marks of a call, and which marks in it are text of an argument."""

from __future__ import annotations

import re

from vlm_server.engine.output.pieces import BLANKS

_IN_STRING = re.compile(r'[\x00-\x1f"\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')


class JsonBody:
    """Follows JSON, with anything before it, in text that comes in pieces.

    Once a string has a line break in it, this is no JSON, and nothing is inside a string any more.
    """

    def __init__(self, *, ends_with_value: bool) -> None:
        """ends_with_value: whether the body does."""
        self.is_begun = False
        """Whether there is something of an object, or of a list at the very beginning."""
        self.is_closed = False
        """Whether the body has ended with its value."""
        self.is_broken = False
        self.is_inside_string = False
        self._ends_with_value = ends_with_value
        self._is_at_start = True
        self._depth = 0
        self._is_escaped = False

    def push(self, text: str) -> int:
        """How many characters of `text` belong to the body."""
        if self.is_broken:
            return len(text)
        at = 0
        while not (self.is_closed or self.is_broken) and at < len(text):
            if self._is_escaped:
                at, self._is_escaped = at + 1, False
                continue
            found = (_IN_STRING if self.is_inside_string else _OUTSIDE).search(text, at)
            before = text[at : found.start()] if found else text[at:]
            self._is_at_start = self._is_at_start and not before.strip(BLANKS)
            at = found.end() if found else len(text)
            if found:
                self._take(found[0])
        return len(text) if self.is_broken else at

    def _take(self, character: str) -> None:
        if self.is_inside_string:
            self._is_escaped = self.is_inside_string = character == "\\"
            self.is_broken = character not in '"\\'
        elif character == '"':
            self.is_inside_string = self.is_begun and self._depth > 0
        elif character == "{" or (character == "[" and (self.is_begun or self._is_at_start)):
            self._depth += 1
            self.is_begun = True
        elif character in "}]" and self.is_begun:
            self._depth = max(self._depth - 1, 0)
            self.is_closed = self._ends_with_value and not self._depth
        self._is_at_start = False


class BracketBody:
    """Follows text that is complete only behind a closing bracket, if it has an opening one."""

    def __init__(self, opening: str, *closing: str) -> None:
        self._opening, self._closing = opening, closing
        self._longest = max(map(len, closing))
        self._unsearched: list[str] = []
        self._is_open = False
        """Whether there is an opening bracket in what was searched."""
        self._tail = ""
        """The end of the text, with one blank for many."""

    def push(self, text: str) -> None:
        """More text of the body."""
        if not self._is_open:
            self._unsearched.append(text)
        tail = self._tail + text
        bare = tail.rstrip(BLANKS)
        self._tail = bare[-self._longest :] + tail[len(bare) :][:1]

    def is_incomplete(self) -> bool:
        """To be asked for at each mark that may end it."""
        if not self._is_open:
            self._is_open = self._opening in "".join(self._unsearched)
            self._unsearched.clear()
        return self._is_open and not self._tail.rstrip(BLANKS).endswith(self._closing)
