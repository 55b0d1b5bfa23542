"""What begins with / in a conversation."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vlm_server.cli.ask import media, output, parameters, regions, saved, typed
from vlm_server.cli.ask.conversation import ChatSession
from vlm_server.cli.ask.media import Medium
from vlm_server.cli.client.daemon import Daemon
from vlm_server.cli.exit_codes import CommandFailed
from vlm_server.cli.text import facts, printable, say, table
from vlm_server.errors import ConfigError
from vlm_server.nearest import did_you_mean
from vlm_server.platform.terminal import columns_of
from vlm_server.settings import Limits
from vlm_server.sizes import file_size

_OFF, _ON = ("off", "none"), "on"
_KEYS = (
    ("Enter", 'sends; Alt-Enter, Ctrl-J, or Enter after \\ or between """ begin a new line'),
    ("Tab", "completes commands, models and files"),
    ("a path", "or a dropped file is shown; Ctrl-V shows the picture in the clipboard"),
    ("Up, Ctrl-R", "find what you typed before; what begins with a space is not kept"),
    ("Ctrl-C", "stops an answer, and keeps what is there"),
)


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """A command: its argument and its purpose, as in the help."""

    argument: str
    purpose: str


COMMANDS = {
    "image": SlashCommand("[FILE]...", "show pictures, videos; without FILE the clipboard"),
    "file": SlashCommand("FILE...", "show documents: PDFs"),
    "drop": SlashCommand("", "leave out what waits for the next question"),
    "model": SlashCommand("[NAME]", "list the models, or go on with another one"),
    "system": SlashCommand("[TEXT | off]", "instructions for all answers"),
    "set": SlashCommand("[NAME VALUE | NAME off]", "temperature, length and the like"),
    "stats": SlashCommand("[on | off]", "figures of the last answer, or of each"),
    "retry": SlashCommand("", "ask the last question again"),
    "new": SlashCommand("", "begin a new conversation"),
    "save": SlashCommand("[FILE.json | FILE.md]", "write the conversation into a file"),
    "load": SlashCommand("FILE.json", "go on with a saved conversation"),
    "help": SlashCommand("", "show this"),
}


class Commands:
    """The commands of one conversation. `pending` are the media that wait for a question."""

    def __init__(self, conversation: ChatSession, daemon: Daemon, limits: Limits) -> None:
        self._conversation = conversation
        self._daemon = daemon
        self._limits = limits
        self._model_names = [str(conversation.model["id"])]
        self.pending: list[Medium] = []
        self.shows_figures = False

    def run(self, name: str, argument: str) -> None:
        """Run a command, other than `retry`. Raises VlmServerError."""
        getattr(self, f"_{name}")(argument)

    def words_of(self, command: str) -> Sequence[tuple[str, str]] | None:
        """What may follow a command, for completion; None for files."""
        if command == "/model":
            return [(name, "") for name in self._model_names]
        if command == "/set":
            ranges = parameters.PARAMETERS.items()
            numbers = [(f"{name} ", parameter.purpose) for name, parameter in ranges]
            efforts = [(f"reasoning {effort}", "") for effort in parameters.EFFORTS]
            return [*numbers, *efforts]
        if command == "/stats":
            return [("on", "after each answer"), ("off", "when asked for")]
        return None if command in ("/image", "/file", "/save", "/load") else ()

    def status(self) -> str:
        """The line below the prompt."""
        model = self._conversation.model
        parts = [str(model["id"])]
        if self.pending:
            parts.append(f"{_counted(self.pending)} for the next question")
        last, limit = self._conversation.last, model.get("max_model_len")
        if last is not None and last.usage.prompt_tokens and self._conversation.turns:
            used = last.usage.prompt_tokens + (last.usage.completion_tokens or 0)
            of = f" of {limit:,}" if isinstance(limit, int) else ""
            parts.append(f"context {used:,}{of} tokens")
        parts += [f"{name} {value}" for name, value in self._conversation.values.items()]
        columns = shutil.get_terminal_size().columns
        return printable(" \u00b7 ".join(parts))[: columns - 1]

    def attach(self, found: Sequence[Medium]) -> None:
        """Let `found` wait for the next question, and say so."""
        for medium in found:
            say(f"+ {medium.noun} {Path(medium.name).name} ({_size(medium)})")
        self.pending += found

    def _image(self, argument: str) -> None:
        if not argument:
            self.attach(media.from_clipboard(self._limits))
            return
        self.attach([media.read(path, self._limits) for path in typed.paths(argument)])

    def _file(self, argument: str) -> None:
        if not argument:
            raise ConfigError("which file? /file report.pdf")
        self._image(argument)

    def _model(self, argument: str) -> None:
        models = self._daemon.list_models()
        self._model_names = names = [str(model["id"]) for model in models]
        if not argument:
            mine = str(self._conversation.model["id"])
            rows = [
                ("*" if name == mine else "", name, str(model.get("state", "")))
                for name, model in zip(names, models, strict=True)
            ]
            say(table([("", "MODEL", "STATE"), *rows]))
            return
        if argument not in names:
            close = did_you_mean(argument, names) or f": it has {', '.join(names)}"
            raise CommandFailed(f"the daemon has no model {argument!r}{close}")
        self._conversation.model = models[names.index(argument)]
        kept = ", which reads the conversation so far" if self._conversation.turns else ""
        say(f"now with {argument}{kept}")

    def _system(self, argument: str) -> None:
        if argument:
            self._conversation.system = None if argument in _OFF else argument
        text = self._conversation.system
        say(f"instructions: {text}" if text else "no instructions")

    def _set(self, argument: str) -> None:
        name, _, value = argument.replace("=", " ").partition(" ")
        values = self._conversation.values
        if not name:
            purposes = {name: one.purpose for name, one in parameters.PARAMETERS.items()}
            purposes[parameters.REASONING] = ", ".join(parameters.EFFORTS)
            rows = [
                (f"{name:<18}  {values.get(name, '-')}", purpose)
                for name, purpose in purposes.items()
            ]
            _tabulate([(f"{'NAME':<18}  VALUE", ""), *rows])
            return
        if not value.strip():
            raise ConfigError(f"which value? /set {name} VALUE, or /set {name} off")
        parsed = parameters.parse(name, value.strip())
        if parsed is None:
            values.pop(name, None)
        else:
            values[name] = parsed
        say(f"{name}: {'the model decides' if parsed is None else parsed}")

    def _stats(self, argument: str) -> None:
        if argument in (_ON, *_OFF):
            self.shows_figures = argument == _ON
            say("figures after each answer" if self.shows_figures else "no figures")
            return
        if self._conversation.last is None:
            raise CommandFailed("there is no answer yet")
        say(output.figures(self._conversation.last))

    def _drop(self, _: str) -> None:
        if not self.pending:
            raise CommandFailed("nothing waits for the next question")
        say(f"left out: {_counted(self.pending)}")
        self.pending = []

    def _new(self, _: str) -> None:
        count = len(self._conversation.turns)
        self._conversation.forget()
        self.pending = []
        answers = f" ({count} answer{'' if count == 1 else 's'} forgotten)" if count else ""
        say(f"a new conversation{answers}")

    def _save(self, argument: str) -> None:
        if not self._conversation.turns:
            raise CommandFailed("there is nothing to save yet")
        path = Path(typed.as_path(argument or saved.default_name()))
        saved.save(path, self._conversation)
        say(f"saved in {path}")

    def _load(self, argument: str) -> None:
        if not argument:
            raise ConfigError("which file? /load NAME.json")
        loaded = saved.load(Path(typed.as_path(argument)), self._limits)
        turns = saved.turns(loaded, self._limits)
        parsed = {name: parameters.parse(name, str(at)) for name, at in loaded.parameters.items()}
        values = {name: value for name, value in parsed.items() if value is not None}
        conversation = self._conversation
        conversation.forget()
        conversation.turns, conversation.system = turns, loaded.system
        conversation.values = values
        count = f"{len(turns)} answer{'' if len(turns) == 1 else 's'} of {loaded.model}"
        say(f"{count}; it goes on with {conversation.model['id']}")

    def _help(self, _: str) -> None:
        rows = [(f"/{name} {one.argument}", one.purpose) for name, one in COMMANDS.items()]
        rows = [*rows, ("/bye", "leave, as does Ctrl-D"), ("", ""), *_KEYS]
        _tabulate(rows)


def _tabulate(rows: Sequence[tuple[str, str]]) -> None:
    print(printable(facts(rows, columns_of(sys.stderr))), file=sys.stderr)


def _size(medium: Medium) -> str:
    """The size of its file, and of a picture."""
    size = file_size(len(medium.data))
    if not medium.is_image:
        return size
    width, height = regions.upright_size(medium.data)
    return f"{width}\u00d7{height}, {size}"


def _counted(found: Sequence[Medium]) -> str:
    nouns = [medium.noun for medium in found]
    return ", ".join(
        f"{nouns.count(noun)} {noun}{'s' if nouns.count(noun) > 1 else ''}"
        for noun in dict.fromkeys(nouns)
    )
