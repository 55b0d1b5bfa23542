"""A conversation at a terminal, kept in memory only."""

from __future__ import annotations

import asyncio
import contextlib
import io
import shlex
import sys
from collections.abc import Sequence

from vlm_server.cli.ask import media, output
from vlm_server.cli.ask.conversation import ChatSession
from vlm_server.cli.ask.media import Medium
from vlm_server.errors import VlmServerError
from vlm_server.settings import Limits
from vlm_server.settings.paths import expand_home

_PROMPT = ">>> "
_HELP = """\
Ask, or give a picture first:  other.png What is different here?
/new begins anew, /bye or Ctrl-D ends, Ctrl-C stops an answer."""


def run(conversation: ChatSession, first_media: Sequence[Medium], limits: Limits) -> int:
    """Read and answer lines until the input ends; `first_media` are the first question's images."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives `input` its line editing and history
    print(_HELP, file=sys.stderr)
    pending_media = list(first_media)
    while True:
        try:
            line = input(_PROMPT).strip()
        except EOFError:
            print(file=sys.stderr)
            return 0
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        match line:
            case "/bye" | "/exit" | "/quit":
                return 0
            case "/help" | "/?":
                print(_HELP, file=sys.stderr)
            case "/new":
                conversation.forget()
                pending_media = []
            case "":
                pass
            case _:
                pending_media = _ask(conversation, pending_media, line, limits)


def _ask(
    conversation: ChatSession, pending_media: list[Medium], line: str, limits: Limits
) -> list[Medium]:
    """Answer one line; returns the images that still wait for a question."""
    screen, num_said = output.Screen(), len(conversation)
    try:
        files, question = files_and_question(line)
        pending_media = [*pending_media, *(media.read(file, limits) for file in files)]
        if not question:
            return pending_media
        screen.wait()
        reply = asyncio.run(conversation.ask(pending_media, question, screen.write))
        screen.end()
        output.print_end(reply, None)
    except KeyboardInterrupt:
        screen.end()
        return [] if len(conversation) > num_said else pending_media
    except VlmServerError as error:
        screen.end()
        print(f"vlm-server: {error}", file=sys.stderr)
        return pending_media
    return []


def files_and_question(line: str) -> tuple[list[str], str]:
    """Files at the beginning of `line`, quoted or escaped as terminals drop them, and the rest."""
    files: list[str] = []
    remaining = line
    while remaining:
        word, next_remaining = _first_word(remaining)
        if word.startswith("~"):
            word = str(expand_home(word))
        if not media.is_media_file(word):
            break
        files.append(word)
        remaining = next_remaining
    return files, remaining


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
