"""Finds marks such as `<tool_call>` in text that comes in pieces."""

from __future__ import annotations

import re
from functools import lru_cache


class Marks:
    """Some marks, to be looked for together: the leftmost counts, and of two there the longer.

    Since that does not depend on how the text was split, neither does what is found.
    """

    def __init__(self, *marks: str) -> None:
        longest_first = sorted(filter(None, marks), key=len, reverse=True)
        whole = "|".join(map(re.escape, longest_first)) or "(?!)"
        begun = "|".join(filter(None, map(_begun, longest_first))) or "(?!)"
        self._whole = re.compile(whole)
        self._whole_or_begun = re.compile(f"{begun}|(?P<whole>{whole})")

    def find(self, text: str, *, is_last: bool = False) -> tuple[int, str]:
        """(how much of `text` stands before it, the mark).

        Without one, the mark is empty, and what stands before it is all that can be no part of
        one, whatever follows `text`; if it `is_last`, nothing does.
        """
        if is_last:
            found = self._whole.search(text)
            return (found.start(), found[0]) if found else (len(text), "")
        found = self._whole_or_begun.search(text)
        return (found.start(), found["whole"] or "") if found else (len(text), "")


def _begun(mark: str) -> str:
    """A pattern for the end of a text that `mark` begins with, but not for all of `mark`."""
    pattern = ""
    for character in reversed(mark[:-1]):
        pattern = re.escape(character) + (rf"(?:\Z|{pattern})" if pattern else r"\Z")
    return pattern


@lru_cache(maxsize=64)
def marks(*texts: str) -> Marks:
    """`Marks`; a model has few, and its requests share them."""
    return Marks(*texts)
