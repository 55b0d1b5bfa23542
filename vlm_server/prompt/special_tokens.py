"""Control tokens in users' text, made plain text.

A user who writes `<|im_end|>` must have those characters read, not end a message. Each such string
is split by a mark, a private-use character that no tokenizer merges with its neighbours, and the
mark's token ids are removed afterwards. Where a template removes a part of the text, so that
the rest becomes such a string, the mark follows every character that could begin one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

_MARKS = "\ue0ff\ue0fe\ue0fd"


class SpecialTokens:
    """The control tokens of one tokenizer, and how to disarm them in text.

    They are the tokens that it calls special, and the placeholders. Other added tokens are left
    alone: templates look for `</think>`, and some vocabularies list line breaks and HTML tags among
    them.
    """

    def __init__(self, tokenizer: Any, placeholders: Iterable[str]) -> None:
        """placeholders: tokens that the processor expands."""
        added_tokens = tokenizer.added_tokens_decoder.values()
        strings = {token.content for token in added_tokens if token.special} | set(placeholders)
        by_first = list(_by_first_character(filter(None, strings)))
        starts = [f"{re.escape(first)}(?={_beginning_with(rests)})" for first, rests in by_first]
        self._pattern = re.compile("|".join(starts))
        """Matches the first character of a control token where one begins."""
        self._beginning = re.compile("|".join(re.escape(first) for first, _ in by_first))
        self._mark_ids = {mark: ids for mark in _MARKS if (ids := _ids_of_mark(tokenizer, mark))}

    def may_begin_in(self, text: str) -> bool:
        """Whether `text` has a character that begins a control token."""
        return self._beginning.search(text) is not None

    def count(self, text: str) -> int:
        """The number of control tokens spelt out in `text`."""
        return sum(1 for _ in self._pattern.finditer(text))

    def choose_mark(self, text: str) -> str | None:
        """A mark that `text` does not hold; None if it holds all of them."""
        return next((mark for mark in self._mark_ids if mark not in text), None)

    def disarm(self, text: str, mark: str) -> str:
        """`text` with `mark` inside every string of a control token."""
        return self._pattern.sub(lambda found: found[0] + mark, text)

    def disarm_beginnings(self, text: str, mark: str) -> str:
        """`text` with `mark` wherever a control token could begin, whatever follows."""
        return self._beginning.sub(lambda found: found[0] + mark, text)

    def without_beginnings(self, text: str) -> str:
        """`text` at the same length, without characters that could begin a control token."""
        return self._beginning.sub("\ufffd", text)

    def remove_marks(self, token_ids: Sequence[int], mark: str) -> list[int]:
        """`token_ids` without those of `mark`."""
        pattern = self._mark_ids[mark]
        cleaned: list[int] = []
        for token_id in token_ids:
            cleaned.append(token_id)
            if cleaned[-len(pattern) :] == pattern:
                del cleaned[-len(pattern) :]
        return cleaned


def _beginning_with(strings: Collection[str]) -> str:
    """A pattern for texts that begin with one of `strings`, as a trie.

    Python tries alternatives one after another, and some vocabularies have a thousand.
    """
    pattern = ""
    while "" not in strings:
        groups = list(_by_first_character(strings))
        if len(groups) > 1:
            branches = [re.escape(first) + _beginning_with(rests) for first, rests in groups]
            return f"{pattern}(?:{'|'.join(branches)})"
        [(first, strings)] = groups
        pattern += re.escape(first)
    return pattern


def _by_first_character(strings: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Each first character, with what follows it in `strings`, none of which is empty."""
    for first, group in groupby(sorted(strings), key=itemgetter(0)):
        yield first, [string[1:] for string in group]


def _ids_of_mark(tokenizer: Any, mark: str) -> list[int]:
    """The ids of `mark` inside a text; empty if the tokenizer merges it with its neighbours."""
    first_ids = tokenizer.encode("<", add_special_tokens=False)
    marked = tokenizer.encode(f"<{mark}<", add_special_tokens=False)
    stands_apart = marked[: len(first_ids)] == first_ids and marked[-1] == first_ids[-1]
    return list(marked[len(first_ids) : -1]) if stands_apart else []
