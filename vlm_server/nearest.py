"""The name that a mistyped one may mean: of settings, options, commands, models and routes."""

from __future__ import annotations

from collections.abc import Iterable

_MIN_SIMILARITY = 0.6


def nearest(word: str, names: Iterable[str], min_similarity: float = _MIN_SIMILARITY) -> str | None:
    """The name most like `word`, None if none is like it.

    Case does not count, and `ORG/NAME` may be meant by a word like NAME.
    """
    import difflib  # only when something is wrong

    by_folded = {name.casefold(): name for name in names}
    by_folded |= {name.rpartition("/")[2]: by_folded[name] for name in list(by_folded)}
    close = difflib.get_close_matches(word.casefold(), by_folded, 1, min_similarity)
    return by_folded[close[0]] if close else None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """`: did you mean NAME?`, or nothing."""
    name = nearest(word, names)
    return f": did you mean {name}?" if name else ""
