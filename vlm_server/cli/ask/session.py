"""A conversation at a terminal: reads lines, answers questions, and runs commands."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence

from vlm_server.cli.ask import media, output, typed
from vlm_server.cli.ask.commands import COMMANDS, Commands
from vlm_server.cli.ask.conversation import ChatSession
from vlm_server.cli.ask.media import Medium
from vlm_server.cli.ask.output import AnswerScreen
from vlm_server.cli.ask.prompt import LineCompleter, Prompt, history_in
from vlm_server.cli.client.daemon import Daemon
from vlm_server.cli.exit_codes import CommandFailed
from vlm_server.cli.text import say, toy_hint
from vlm_server.errors import VlmServerError
from vlm_server.nearest import did_you_mean
from vlm_server.platform.terminal import DIM, RED
from vlm_server.settings import EMBEDDED_MODEL, Limits
from vlm_server.settings.paths import state_folder

_LONGER = "/set max_tokens NUMBER"
_LEAVE = ("/bye", "/exit", "/quit")
_SENSES = (("vision", "pictures"), ("video", "videos"))


class Session:
    """What people do at the prompt until they leave."""

    def __init__(
        self,
        conversation: ChatSession,
        daemon: Daemon,
        limits: Limits,
        *,
        is_plain: bool = False,
        keeps_history: bool = True,
    ) -> None:
        self._conversation = conversation
        self._limits = limits
        self._is_plain = is_plain
        self._daemon = daemon
        self._commands = Commands(conversation, daemon, limits)
        commands = [(f"/{name}", command.purpose) for name, command in COMMANDS.items()]
        history = history_in(state_folder() / "ask-history" if keeps_history else None)
        completer = LineCompleter([*commands, ("/bye", "leave")], self._commands.words_of)
        self._prompt = Prompt(history, completer, self._commands.status, self._paste)

    def run(self, first_media: Sequence[Medium]) -> int:
        """Read and answer until the input ends; `first_media` are the first question's."""
        with contextlib.suppress(EOFError):
            self._greet()
            self._commands.attach(first_media)
            while (line := self._read()) not in _LEAVE:
                try:
                    self._handle(line)
                except VlmServerError as error:
                    complain(error)
                except KeyboardInterrupt:
                    note("(stopped)\n")
        return 0

    def _read(self) -> str:
        try:
            return self._prompt.read()
        except KeyboardInterrupt:
            note("(Ctrl-D or /bye leaves)")
            return ""

    def _greet(self) -> None:
        model = self._conversation.model
        senses = model.get("capabilities") or ()
        seen = [noun for name, noun in _SENSES if name in senses]
        sees = f" \u00b7 it sees {' and '.join(seen)}" if seen else ""
        where = self._daemon.url.removesuffix("/v1")
        note(f"{model['id']} at {where}{sees}")
        note("Drop a picture here, or just ask. /help says more, Ctrl-D leaves.")
        if model["id"] == EMBEDDED_MODEL:
            note(toy_hint())

    def _handle(self, line: str) -> None:
        if not line:
            return
        name, _, argument = line.partition(" ")
        if name.removeprefix("/") in COMMANDS and name.startswith("/"):
            if name == "/retry":
                self._retry()
            else:
                self._commands.run(name[1:], argument.strip())
            return
        if name.startswith("/") and "/" not in name[1:] and not typed.is_existing_medium(name):
            close = did_you_mean(name[1:], [*COMMANDS, "bye"]).replace("mean ", "mean /")
            raise CommandFailed(f"there is no command {name}{close or ': /help lists them'}")
        files, question = typed.files_and_question(line)
        self._commands.attach([media.read(file, self._limits) for file in files])
        if question:
            self._answer(question)

    def _answer(self, question: str) -> None:
        """Answer a question about what waits, which waits on if there is no answer."""
        try:
            self._ask(self._commands.pending, question)
        except VlmServerError as error:
            complain(error)
            if self._commands.pending:
                note("(its files wait for the next question; /drop leaves them out)")

    def _ask(self, pending: Sequence[Medium], question: str) -> None:
        """Answer one question. Its media wait for the next one if there is no answer."""
        conversation, screen = self._conversation, AnswerScreen(is_plain=self._is_plain)
        num_turns = len(conversation.turns)
        try:
            screen.wait()
            try:
                reply = asyncio.run(conversation.ask(pending, question, screen))
            finally:
                screen.end()
        except VlmServerError as error:
            if len(conversation.turns) > num_turns:
                raise CommandFailed(f"{error} (what was written is kept)") from None
            raise
        finally:
            kept = len(conversation.turns) > num_turns
            self._commands.pending = [] if kept else list(pending)
        if not reply.text:
            note("(no answer)" if not reply.reasoning else "(it thought, and said nothing)")
        output.print_end(reply, None, advice=_LONGER)
        if self._commands.shows_figures:
            note(output.figures(reply))
        print(file=sys.stderr)

    def _retry(self) -> None:
        """Ask the last question again; without a new answer, the old one stays."""
        turns = self._conversation.turns
        if not turns:
            raise CommandFailed("there is no question yet")
        turn, pending = turns.pop(), self._commands.pending
        num_turns = len(turns)
        try:
            self._ask(turn.media, turn.question)
        finally:
            if len(turns) == num_turns:
                turns.append(turn)
            self._commands.pending = pending

    def _paste(self) -> None:
        try:
            self._commands.attach(media.from_clipboard(self._limits))
        except VlmServerError as error:
            complain(error)


def note(text: str) -> None:
    """A line that is no answer, dimmed where there are colours."""
    say(text, style=DIM)


def complain(error: VlmServerError) -> None:
    """An error, in red where there are colours."""
    say(" ".join(str(error).split()), style=RED)
