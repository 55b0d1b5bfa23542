"""The parser of the command line: errors of one line, and help with the sections of a manual page.

Knows argparse; knows none of the commands.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from vlm_server.cli import exit_codes
from vlm_server.cli.usage.nearest import did_you_mean

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_MOST_COLUMNS, _LEAST_COLUMNS = 100, 40
_HELP_COLUMN = 30
_NO_ACTION = re.compile(r"required: (COMMAND|ACTION)$")


class Manual(NamedTuple):
    """What help says of a command beside its arguments.

    `examples` are pairs of what it does and the command line; `environment` and `files` pairs of
    name and text; `exit_codes` pairs of code and text, if they are not those of all commands.
    """

    examples: Sequence[tuple[str, str]] = ()
    environment: Sequence[tuple[str, str]] = ()
    files: Sequence[tuple[str, str]] = ()
    exit_codes: Sequence[tuple[int, str]] = tuple(exit_codes.MEANINGS.items())


class Parser(argparse.ArgumentParser):
    """Of the program, and of each command. Options can't be shortened."""

    def __init__(self, **options: Any) -> None:
        options |= {"formatter_class": _formatter, "allow_abbrev": False, "add_help": False}
        super().__init__(**options)
        self.manual = Manual()
        self.others = self.add_argument_group("other options")
        self.others.add_argument("-h", "--help", action="help", help="show this and exit")
        self.others.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,  # so that it may stand before or after the command
            help="on an error, show a traceback and all details",
        )
        self.set_defaults(parser=self)

    def parse_args(self, arguments: Any = None, namespace: Any = None) -> Any:
        """As argparse does, but says of an unknown option which one is like it."""
        if arguments and arguments[0].startswith("-"):  # or it would miss the command first
            self._refuse_unknown([word for word in arguments[:1] if word not in self._options])
        options, unknown = self.parse_known_args(arguments, namespace)
        options.parser._refuse_unknown(unknown)
        return options

    @property
    def _options(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        if words:
            word = words[0].partition("=")[0]
            kind = "option" if word.startswith("-") else "argument"
            self.error(f"unknown {kind} {word}{did_you_mean(word, self._options)}")

    def error(self, message: str) -> NoReturn:
        """One line on stderr, and exit code 2; the help, if only a command is missing."""
        if _NO_ACTION.search(message):
            self.print_help(sys.stderr)
            self.exit(exit_codes.WRONG_SETTINGS)
        text = message.removeprefix("argument ")
        self.exit(exit_codes.WRONG_SETTINGS, f"{self.prog}: {text} (see {self.prog} --help)\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse would be content with output that can't be written."""
        (file or sys.stderr).write(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = list(map(str, action.choices))
            close = did_you_mean(str(value), names) or f"; there are: {', '.join(names)}"
            raise argparse.ArgumentError(action, f"there is no {value!r}{close}")

    def format_help(self) -> str:
        """argparse's, and the sections of the manual."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        for paragraph in (self.description or "").split("\n\n"):
            formatter.add_text(paragraph)
        groups = [group for group in self._action_groups if group is not self.others]
        for group in [*groups, self.others]:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help() + "".join(self._sections())

    def _sections(self) -> Iterator[str]:
        if self.manual.examples:
            lines = "\n\n".join(f"  {text}:\n    {line}" for text, line in self.manual.examples)
            yield f"\nexamples:\n{lines}\n"
        for name in ("environment", "files"):
            if rows := getattr(self.manual, name):
                yield _table(name, rows)
        if not has_commands(self):
            rows = [(str(code), text) for code, text in self.manual.exit_codes]
            yield _table("exit codes", rows)


def has_commands(parser: argparse.ArgumentParser) -> bool:
    """Whether `parser` only chooses one of several commands."""
    return any(isinstance(action, argparse._SubParsersAction) for action in parser._actions)


def commands_of(parser: argparse.ArgumentParser) -> list[tuple[str, argparse.ArgumentParser]]:
    """Summary and parser of each command that `parser` chooses from."""
    return [
        (str(shown.help), action.choices[shown.dest])
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for shown in action._choices_actions
    ]


def every(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """`parser`, and those of all commands below it."""
    yield parser
    for _, each in commands_of(parser):
        yield from every(each)


def columns() -> int:
    """How wide lines may be."""
    import shutil

    return max(_LEAST_COLUMNS, min(shutil.get_terminal_size().columns - 2, _MOST_COLUMNS))


def _table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    import textwrap

    margin = min(max(len(name) for name, _ in rows) + 4, _HELP_COLUMN)
    lines = []
    for name, text in rows:
        wrapped = textwrap.wrap(text, max(20, columns() - margin))
        head = f"  {name}".ljust(margin)
        lines += [head.rstrip()] if len(head) > margin else []
        first = " " * margin if len(head) > margin else head
        lines += [first + wrapped[0], *(" " * margin + line for line in wrapped[1:])]
    return f"\n{title}:\n" + "\n".join(lines) + "\n"


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=_HELP_COLUMN, width=columns())
