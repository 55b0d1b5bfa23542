"""Changes of a settings file's text, and their reversal."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import Any, NamedTuple, Protocol

from vlm_server.cli.connect import tree
from vlm_server.cli.connect.settings_file import Record
from vlm_server.cli.connect.tree import MISSING, Path, Unusable

_MAX_LINES = 5_000
"""Of a file whose changes are merged line by line: the time grows with their square."""


class Format(Protocol):
    """A module of `formats`."""

    EMPTY: str
    HAS_NAMED_ITEMS: bool
    """Whether what is put below the top is an item of a list."""

    def parse(self, text: str) -> dict[str, Any]:
        """The values in `text`. Raises Unusable."""

    def put(self, text: str, path: Path, value: Any) -> str:
        """`text` with `value` at `path`."""

    def drop(self, text: str, path: Path) -> str:
        """`text` without the value at `path`, which is there."""


class Edit(NamedTuple):
    """A value to put at `path`; `MISSING`: to drop what is there."""

    path: Path
    value: Any


class Undone(NamedTuple):
    """The text without our change, None for no file; and what was kept, as it was changed since."""

    text: str | None
    kept: tuple[Path, ...] = ()


def edit(form: Format, text: str, edits: Sequence[Edit]) -> str:
    """`text` after `edits`, which change nothing else. Raises Unusable."""
    has_crlf = text.count("\r\n") == text.count("\n") > 0
    edited = text.replace("\r\n", "\n") if has_crlf else text
    expected = copy.deepcopy(form.parse(edited))
    for path, value in edits:
        if value is MISSING:
            tree.drop(expected, path)
            edited = form.drop(edited, path)
        else:
            tree.put(expected, path, value, in_list=form.HAS_NAMED_ITEMS)
            edited = form.put(edited, path, value)
    actual = form.parse(edited)
    for holder in _holders(path for path, value in edits if value is MISSING):
        for values in (actual, expected):  # TOML has no empty tables above others
            if tree.get(values, holder) in ({}, []):
                tree.drop(values, holder)
    if actual != expected:
        raise Unusable(tree.UNSAFE)
    return edited.replace("\n", "\r\n") if has_crlf else edited


def undo(form: Format, current: str, record: Record) -> Undone:
    """`current` without the change of `record`: exactly the text before, if nothing else changed.

    Else each value of ours that is still there becomes what it was; by its lines, with the comments
    in them, if these have not changed since. Raises Unusable.
    """
    if current == record.written:
        return Undone(record.before)
    before = form.parse(record.before or form.EMPTY)
    written, now = form.parse(record.written), form.parse(current)
    edits: list[Edit] = []
    kept: list[Path] = []
    for path in record.paths:
        value = tree.get(now, path)
        if value is MISSING or value == tree.get(before, path):
            continue
        if value != tree.get(written, path):
            kept.append(path)
            continue
        edits.append(Edit(path, tree.get(before, path)))
    text = _prune(form, edit(form, current, edits), before, record.paths)
    if record.before is None:
        return Undone(None if text.split() in ([], form.EMPTY.split()) else text, tuple(kept))
    merged = _merged(record.written, record.before, current)
    with contextlib.suppress(Unusable):
        if merged is not None and form.parse(merged) == form.parse(text):
            return Undone(merged, tuple(kept))
    return Undone(text, tuple(kept))


def _merged(written: str, before: str, current: str) -> str | None:
    """`current` with what differs of `written` as in `before`; None if that has changed since."""
    old, new, now = (text.splitlines(keepends=True) for text in (written, before, current))
    if max(map(len, (old, new, now))) > _MAX_LINES:
        return None
    kept = SequenceMatcher(None, old, now, autojunk=False).get_matching_blocks()
    changes = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    for tag, start, end, first, last in reversed(changes):
        if tag != "equal":
            block = next((b for b in kept if b.a <= start and end <= b.a + b.size), None)
            if block is None:
                return None
            now[start - block.a + block.b : end - block.a + block.b] = new[first:last]
    return "".join(now)


def _holders(paths: Iterable[Path]) -> list[Path]:
    """What holds the values at `paths`, innermost first."""
    holders = {path[:length] for path in paths for length in range(1, len(path))}
    return sorted(holders, key=len, reverse=True)


def _prune(form: Format, text: str, before: dict[str, Any], paths: Sequence[Path]) -> str:
    """`text` without emptied tables and lists above `paths` that were not there `before`."""
    for holder in _holders(paths):
        if tree.get(form.parse(text), holder) in ({}, []) and tree.get(before, holder) is MISSING:
            text = edit(form, text, [Edit(holder, MISSING)])
    return text
