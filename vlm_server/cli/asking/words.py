"""What the words of a question are: files, and then the question."""

from __future__ import annotations

import mimetypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vlm_server.errors import ConfigError

STDIN = "-"
_MEDIA = ("image/", "video/")


@dataclass(frozen=True, slots=True)
class Words:
    """`files` may hold `-`, and so may `question`: standard input. None is no question."""

    files: Sequence[str]
    question: str | None


def split(words: Sequence[str]) -> Words:
    """All words but the last are files, and so is the last one if it is or looks like one.

    Raises ConfigError if two of them are standard input.
    """
    if not words:
        return Words((), None)
    *files, last = words
    is_file = last == STDIN and not files
    if is_file or (last != STDIN and is_media_file(last)):
        split_words = Words(words, None)
    else:
        split_words = Words(files, last)
    if [*split_words.files, split_words.question].count(STDIN) > 1:
        raise ConfigError("standard input (-) can be one picture or the question, not both")
    return split_words


def is_media_file(word: str) -> bool:
    """Whether `word` is a file, or the name of a picture or a video that could be one."""
    try:
        if Path(word).is_file():
            return True
    except (OSError, ValueError):  # too long for a name, or with a zero byte
        return False
    is_named_so = (mimetypes.guess_type(word)[0] or "").startswith(_MEDIA)
    return is_named_so and not any(character.isspace() for character in word)
