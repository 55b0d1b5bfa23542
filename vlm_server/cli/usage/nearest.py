"""Words of others in messages of ours: the name that was meant, and no control characters."""

from __future__ import annotations

from collections.abc import Iterable

_CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n"), ord("\t")}, "\ufffd")


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """`: did you mean NAME?` for the name most like `word`; empty if none is like it."""
    import difflib  # only when something is wrong

    by_folded = {name.casefold(): name for name in names}
    by_folded |= {name.rpartition("/")[2]: by_folded[name] for name in list(by_folded)}
    close = difflib.get_close_matches(word.casefold(), by_folded, n=1)
    return f": did you mean {by_folded[close[0]]}?" if close else ""


def printable(text: str) -> str:
    """`text` without the control characters by which it could command a terminal."""
    return text.translate(_CONTROLS)
