"""Parser of the command line: errors of one line, and help with the sections of a manual page."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

from vlm_server.cli import exit_codes
from vlm_server.nearest import did_you_mean

_MAX_COLUMNS, _MIN_COLUMNS = 100, 40
_HELP_COLUMN = 30
_NO_ACTION = re.compile(r"required: (COMMAND|ACTION)$")
HUB = (
    ("HF_TOKEN", "Token for private and gated models; `hf auth login` stores one."),
    ("HF_ENDPOINT", "Another hub than https://huggingface.co."),
    ("HF_HUB_OFFLINE", "1: nothing is downloaded."),
    ("HF_HOME, HF_HUB_CACHE", "Where downloaded models are kept."),
)
TERMINAL = (("NO_COLOR", "If set, no colours."), ("TERM", "dumb: plain lines, no moving progress."))
HUB_FILES = (("~/.cache/huggingface/hub", "Downloaded models, unless HF_HOME says otherwise."),)
SETTINGS = (
    (
        "VLM_SERVER_<SECTION>_<NAME>",
        "A setting, as VLM_SERVER_SERVER_PORT; overrides the file.",
    ),
)
CONFIG_FILES = (
    (
        "~/.config/vlm-server/config.toml",
        "Settings in TOML, unless --config names another file; XDG_CONFIG_HOME moves it. "
        "`vlm-server check-config --print-defaults` has all.",
    ),
)


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


class Manual(NamedTuple):
    """Further help on a command: pairs of purpose and command line, or of name and text.

    `exit_codes` are set if they differ from those of other commands.
    """

    examples: Sequence[tuple[str, str]] = ()
    environment: Sequence[tuple[str, str]] = ()
    files: Sequence[tuple[str, str]] = ()
    exit_codes: Sequence[tuple[int, str]] = tuple(exit_codes.MEANINGS.items())


OVERVIEW = Manual(
    examples=(
        ("Serve the small model that comes with the program", "vlm-server serve"),
        ("Ask about a picture", 'vlm-server ask picture.png "What shape is this?"'),
        ("What a command takes", "vlm-server ask --help"),
        (
            "Complete commands in bash, from now on",
            "vlm-server completions bash > ~/.local/share/bash-completion/completions/vlm-server",
        ),
    ),
    environment=(*SETTINGS, *HUB, *TERMINAL),
    files=(*CONFIG_FILES, *HUB_FILES),
)


class Parser(argparse.ArgumentParser):
    """The parser of the program, and of each command. Options can't be shortened."""

    def __init__(self, **options: Any) -> None:
        options |= {"formatter_class": _Formatter, "allow_abbrev": False, "add_help": False}
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
        """Parsed options; an unknown one is an error that names the nearest."""
        if arguments and arguments[0].startswith("-"):  # else a missing command comes first
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
        """Print one line on stderr, or the help if only a command is missing; exit with 2."""
        if _NO_ACTION.search(message):
            self.print_help(sys.stderr)
            self.exit(exit_codes.WRONG_SETTINGS)
        text = message.removeprefix("argument ")
        self.exit(exit_codes.WRONG_SETTINGS, f"{self.prog}: {text} (see {self.prog} --help)\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write `message`, and raise if that fails: argparse would ignore the error."""
        (file or sys.stderr).write(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = list(map(str, action.choices))
            close = did_you_mean(str(value), names) or f"; there are: {', '.join(names)}"
            raise argparse.ArgumentError(action, f"there is no {value!r}{close}")

    def format_help(self) -> str:
        """The help of argparse, and the sections of the manual."""
        self._action_groups.sort(key=lambda group: group is self.others)
        sections = self._get_formatter()
        codes = () if commands_of(self) else self.manual.exit_codes
        for title, rows in (
            ("environment", self.manual.environment),
            ("files", self.manual.files),
            ("exit codes", [(str(code), text) for code, text in codes]),
        ):
            sections.start_section(title)
            sections.add_arguments(
                argparse.Action((), name, metavar=name, help=text.replace("%", "%%"))
                for name, text in rows
            )
            sections.end_section()
        lines = "\n\n".join(f"  {text}:\n    {line}" for text, line in self.manual.examples)
        examples = f"\nexamples:\n{lines}\n" if lines else ""
        return f"{super().format_help()}{examples}\n{sections.format_help()}"


class _Formatter(argparse.HelpFormatter):
    """The formatter of argparse in which an empty line begins a paragraph."""

    def __init__(self, prog: str) -> None:
        columns = shutil.get_terminal_size().columns - 2
        width = max(_MIN_COLUMNS, min(columns, _MAX_COLUMNS))
        super().__init__(prog, max_help_position=_HELP_COLUMN, width=width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n\n".join(fill(paragraph, width, indent) for paragraph in text.split("\n\n"))


def commands_of(parser: Parser) -> list[tuple[str, Parser]]:
    """The summary and parser of each subcommand of `parser`, if any."""
    return [
        (str(shown.help), action.choices[shown.dest])
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for shown in action._choices_actions
    ]


def all_commands(parser: Parser) -> Iterator[Parser]:
    """`parser`, and the parsers of all commands below it."""
    yield parser
    for _, parser_of_command in commands_of(parser):
        yield from all_commands(parser_of_command)
