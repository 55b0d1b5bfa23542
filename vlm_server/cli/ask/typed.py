"""Files in a line that someone typed, or that a terminal inserted where files were dropped."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path
from urllib.parse import unquote, urlsplit

from vlm_server.cli.ask import media
from vlm_server.settings.paths import expand_home

_PATH_STARTS = ("/", "~/", "./", "../", "file://")
_SUFFIX_END = re.compile(r"\.\w{2,5}(?=\s|$)")
_WORD = re.compile(r"""(?<!\S)(?:'[^'\n]+'|"[^"\n]+"|(?:\\.|[^\s\\'"])+)""")
_PUNCTUATION = ".,;:!?)"


def files_and_question(line: str) -> tuple[list[str], str]:
    """The files that `line` names, and the question.

    Files at the beginning leave the question. Of those within it, which must exist and begin as
    paths do, the name stays.
    """
    files: list[str] = []
    remaining = line
    while taken := _first_file(remaining):
        files.append(taken[0])
        remaining = taken[1]

    def name_of(match: re.Match[str]) -> str:
        word = match[0].rstrip(_PUNCTUATION)
        path = as_path(_unquoted(word))
        if not _unquoted(word).startswith(_PATH_STARTS) or not is_existing_medium(path):
            return match[0]
        files.append(path)
        return Path(path).name + match[0][len(word) :]

    return files, _WORD.sub(name_of, remaining)


def paths(text: str) -> list[str]:
    """The paths in the argument of a command: one with spaces as it is, or several shell words."""
    whole = as_path(text)
    if Path(whole).is_file():
        return [whole]
    try:
        return [as_path(word) for word in shlex.split(text)]
    except ValueError:  # an apostrophe
        return [whole]


def as_path(word: str) -> str:
    """`word` as a path: with a home for `~`, and without the form of a URL."""
    if word.startswith("file://"):
        return unquote(urlsplit(word).path)
    return str(expand_home(word)) if word.startswith("~") else word


def is_existing_medium(path: str) -> bool:
    """Whether `path` is a file that is named as a picture, video or document."""
    try:
        return media.is_named_as_medium(path) and Path(path).is_file()
    except (OSError, ValueError):
        return False


def _first_file(text: str) -> tuple[str, str] | None:
    """The file at the beginning of `text`, and what follows."""
    word, rest = _first_word(text)
    path = as_path(word)
    if path and media.is_media_file(path) and not _is_start_of_longer(text, path):
        return path, rest
    if text.startswith(_PATH_STARTS):  # with spaces that nobody escaped
        for end in reversed([match.end() for match in _SUFFIX_END.finditer(text)]):
            path = as_path(text[:end])
            if is_existing_medium(path):
                return path, text[end:].lstrip()
    return None


def _is_start_of_longer(text: str, path: str) -> bool:
    """Whether `path` is only the part of an absolute path up to its first space."""
    return text.startswith(_PATH_STARTS) and not Path(path).is_file()


def _first_word(text: str) -> tuple[str, str]:
    """First word as a shell reads it, and the text after it."""
    stream = io.StringIO(text)
    lexer = shlex.shlex(stream, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        word = lexer.get_token() or ""
    except ValueError:  # an unclosed quote
        return text, ""
    return word, text[stream.tell() :].lstrip()


def _unquoted(word: str) -> str:
    try:
        return "".join(shlex.split(word))
    except ValueError:
        return word
