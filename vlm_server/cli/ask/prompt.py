"""The line that is typed in a conversation: keys, history, completion and what stands below it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition, has_focus, is_searching
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.styles import Style

from vlm_server.cli.ask import media
from vlm_server.cli.text import say

PROMPT = ">>> "
_QUOTES = '"""'
_MAX_HISTORY_BYTES = 256 << 10
_MAX_LINE_CHARS = 4096
_ENTRY = re.compile(rb"\n# ")
_STYLE = Style.from_dict({"bottom-toolbar": "noreverse fg:ansibrightblack", "prompt": "bold"})
_LAST_WORD = re.compile(r"(?:\\.|\S)*$")

WordsOf = Callable[[str], Sequence[tuple[str, str]] | None]
"""From a command to the words that may follow it, with what they mean; None for files."""


class PrivateHistory(FileHistory):
    """What was typed before, in a file that its owner alone can read, of bounded size.

    A line that begins with a space, or is long, is not kept.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        if (data := path.read_bytes())[_MAX_HISTORY_BYTES:]:
            half = data[-_MAX_HISTORY_BYTES // 2 :]
            start = _ENTRY.search(half)
            path.write_bytes(half[start.start() :] if start else b"")
        super().__init__(path)

    def store_string(self, string: str) -> None:
        if not string.startswith(" ") and len(string) <= _MAX_LINE_CHARS:
            with contextlib.suppress(OSError):  # a full disk is no reason to end a conversation
                super().store_string(string)


def history_in(path: Path | None) -> History:
    """The history in a file; one that is kept in memory where there is none."""
    if path is not None:
        try:
            return PrivateHistory(path)
        except OSError as error:
            reason = error.strerror or error
            say(f"(what you type is not kept: {path}: {reason})")
    return InMemoryHistory()


class LineCompleter(Completer):
    """Completes commands, their arguments, and files anywhere in a line."""

    def __init__(self, commands: Sequence[tuple[str, str]], words_of: WordsOf) -> None:
        self._commands = commands
        self._words_of = words_of
        self._files = PathCompleter(expanduser=True, file_filter=_is_folder_or_medium)
        self._all_files = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        text = document.text_before_cursor
        command, space, argument = text.partition(" ")
        if text.startswith("/") and "\n" not in text:
            if not space:
                yield from _matching(self._commands, text)
            elif command in dict(self._commands):
                words = self._words_of(command)
                if words is not None:
                    yield from _matching(words, argument)
                    return
                is_any = command in ("/save", "/load")
                yield from _paths(self._all_files if is_any else self._files, argument, "")
                return
        match = _LAST_WORD.search(text)
        word = match[0] if match else ""
        if word.startswith(("/", "~", ".")):
            yield from _paths(self._files, word.replace("\\", ""), "\\")


def _matching(words: Sequence[tuple[str, str]], text: str) -> Iterable[Completion]:
    for word, meaning in words:
        if word.startswith(text):
            yield Completion(word, -len(text), display_meta=meaning)


def _paths(completer: PathCompleter, text: str, escape: str) -> Iterable[Completion]:
    for completion in completer.get_completions(Document(text), CompleteEvent()):
        rest = completion.text.replace(" ", f"{escape} ") if escape else completion.text
        yield Completion(rest, completion.start_position, completion.display)


def _is_folder_or_medium(path: str) -> bool:
    return media.is_named_as_medium(path) or Path(path).is_dir()


class Prompt:
    """Reads what is typed. `status` is the line below, `on_paste` is called for Ctrl-V."""

    def __init__(
        self,
        history: History,
        completer: Completer,
        status: Callable[[], str],
        on_paste: Callable[[], None],
    ) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=history,
            completer=completer,
            complete_in_thread=True,
            complete_while_typing=Condition(self._is_command),
            auto_suggest=AutoSuggestFromHistory(),
            key_bindings=_keys(on_paste),
            multiline=True,
            prompt_continuation=lambda width, _, wraps: " " * width if wraps else "... ",
            bottom_toolbar=status,
            style=_STYLE,
            enable_open_in_editor=True,
            reserve_space_for_menu=6,
            output=create_output(always_prefer_tty=True),
        )

    def read(self) -> str:
        """The next text. Raises EOFError for Ctrl-D, KeyboardInterrupt for Ctrl-C without text."""
        text = self._session.prompt([("class:prompt", PROMPT)])
        stripped = text.strip()
        if stripped.startswith(_QUOTES) and stripped.endswith(_QUOTES) and len(stripped) > 5:
            return stripped[len(_QUOTES) : -len(_QUOTES)].strip()
        return stripped

    def _is_command(self) -> bool:
        return self._session.default_buffer.text.startswith("/")


def _keys(on_paste: Callable[[], None]) -> KeyBindings:
    """Enter sends, unless the text goes on; Alt-Enter and Ctrl-J begin a line."""
    keys = KeyBindings()
    is_typing = has_focus("DEFAULT_BUFFER") & ~is_searching

    @keys.add("enter", filter=is_typing)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        elif buffer.text.lstrip().startswith(_QUOTES) and buffer.text.count(_QUOTES) == 1:
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=is_typing)
    @keys.add("c-j", filter=is_typing)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=is_typing)
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    @keys.add("c-v", filter=is_typing)
    def _(_: KeyPressEvent) -> None:
        run_in_terminal(on_paste)

    return keys
