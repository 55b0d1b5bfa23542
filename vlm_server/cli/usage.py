"""Parser of the command line: errors of one line, help of one screen, and full help.

`--help` shows what most people use; `--help-all` has the sections of a manual page.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

from vlm_server.cli import exit_codes
from vlm_server.cli.text import say
from vlm_server.nearest import did_you_mean
from vlm_server.platform.terminal import BOLD, styled

_MAX_COLUMNS, _MIN_COLUMNS = 100, 40
_HELP_COLUMN = 28
_NUM_EXAMPLES, _NUM_FIRST_STEPS = 2, 3
"""Examples of a command, and of all in the short help."""
_NO_ACTION = re.compile(r"required: (COMMAND|ACTION)$")
_NO_NUMBER = re.compile(r"invalid (int|float) value: (.*)")
_NUMBERS = {"int": "a whole number", "float": "a number"}
_ELSEWHERE = {
    "run": "serve, and ask in another terminal",
    "start": "serve",
    "stop": "service stop, or Ctrl-C in the daemon's terminal",
    "list": "models list",
    "rm": "models rm",
    "show": "models check",
    "logs": "service logs",
    "status": "ps",
    "help": "--help",
    "version": "--version",
    "-V": "--version",
    "--port": "--url",
}
"""What words of other programs, such as Ollama, are called here."""
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
Rows = Sequence[tuple[str, str]]


class Manual(NamedTuple):
    """Further help on a command: pairs of purpose and command line, or of name and text.

    `exit_codes` are set if they differ from those of other commands.
    """

    examples: Rows = ()
    environment: Rows = ()
    files: Rows = ()
    exit_codes: Sequence[tuple[int, str]] = tuple(exit_codes.MEANINGS.items())


OVERVIEW = Manual(
    examples=(
        ("Serve the small model that comes with the program, or your own", "vlm-server serve"),
        ("Ask about a picture, from another terminal", 'vlm-server ask picture.png "What is it?"'),
        ("Use it in Claude Code and other programs", "vlm-server connect claude-code"),
        (
            "Complete commands in bash, from now on",
            "vlm-server completions bash > ~/.local/share/bash-completion/completions/vlm-server",
        ),
    ),
    environment=(*SETTINGS, *HUB, *TERMINAL),
    files=(*CONFIG_FILES, *HUB_FILES),
)


class _FullHelp(argparse.Action):
    """`--help-all`."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, Parser)
        parser._print_message(parser.format_full_help(), sys.stdout)
        parser.exit()


class Parser(argparse.ArgumentParser):
    """The parser of the program, and of each command. Options can't be shortened."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"allow_abbrev": False, "add_help": False})
        self.manual = Manual()
        self.others = self.add_argument_group("other options")
        self.others.add_argument("-h", "--help", action="help", help="show the short help")
        self.others.add_argument(
            "--help-all", action=_FullHelp, nargs=0, help="show all options, and what else counts"
        )
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
            self.error(f"unknown {kind} {word}{_meant(word, self._options, self._options)}")

    def error(self, message: str) -> NoReturn:
        """Print one line on stderr, or the help if only a command is missing; exit with 2."""
        if _NO_ACTION.search(message):
            self.print_help(sys.stderr)
            self.exit(exit_codes.WRONG_SETTINGS)
        text = message.removeprefix("argument ").removeprefix("COMMAND: ").removeprefix("ACTION: ")
        text = text.replace("expected one argument", "its value is missing")
        text = text.replace("the following arguments are required", "missing")
        text = _NO_NUMBER.sub(lambda match: f"{match[2]} is not {_NUMBERS[match[1]]}", text)
        say(f"{text} (see '{self.prog} --help')", f"{self.prog}: ")
        self.exit(exit_codes.WRONG_SETTINGS)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write `message`, and raise if that fails: argparse would ignore the error."""
        (file or sys.stderr).write(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = list(map(str, action.choices))
            is_command = isinstance(action, _SUBPARSERS)
            known = [*names, *self._options] if is_command else names
            close = _meant(str(value), names, known) or f"; there are: {', '.join(names)}"
            noun = "command " if is_command else ""
            raise argparse.ArgumentError(action, f"there is no {noun}{value!r}{close}")

    # ---- help ----------------------------------------------------------------------

    def format_usage(self) -> str:
        """One line: the arguments, without the names of options."""
        arguments = [
            invocation(action)
            for action in self._actions
            if not action.option_strings and not commands_of(self)
        ]
        words = ["COMMAND ..."] if commands_of(self) else ["[OPTION]...", *arguments]
        return f"usage: {self.usage or ' '.join([self.prog, *words])}\n"

    def format_help(self) -> str:
        """The short help: what most people use, on one screen."""
        options = [(invocation(action), _help_of(action)) for action in self._common_actions()]
        commands = _section("commands", _command_rows(self), _row)
        write, count = (_bare_example, _NUM_FIRST_STEPS) if commands else (_example, _NUM_EXAMPLES)
        examples = _section("examples", self.manual.examples[:count], write)
        end = "--help-all shows all options, files and exit codes.\n"
        parts = (
            self.format_usage(),
            _paragraphs((self.description or "").split("\n\n")[:1]),
            *((examples, commands) if commands else (_section("options", options, _row), examples)),
            end if not commands else "COMMAND --help shows what a command takes.\n",
        )
        return "\n".join(part for part in parts if part)

    def format_full_help(self) -> str:
        """The full help, with the sections of a manual page."""
        groups = sorted(self._action_groups, key=lambda group: group is self.others)
        codes = () if commands_of(self) else self.manual.exit_codes
        parts = (
            self.format_usage(),
            _paragraphs((self.description or "").split("\n\n")),
            _section("commands", _command_rows(self), _row),
            *(_section(str(group.title), _rows_of(group), _row) for group in groups),
            _section("examples", self.manual.examples, _example),
            _section("environment", self.manual.environment, _row),
            _section("files", self.manual.files, _row),
            _section("exit codes", [(str(code), text) for code, text in codes], _row),
        )
        return "\n".join(part for part in parts if part)

    def _common_actions(self) -> list[argparse.Action]:
        own = [action for action in self._actions if action not in self.others._group_actions]
        return [action for action in own if not vars(action).get(_IS_RARE)]


def _meant(word: str, names: Sequence[str], known: Sequence[str]) -> str:
    """`: did you mean ...?`, or nothing: the nearest of `names`, unless other programs have `word`
    for what begins with one of the words `known` here."""
    meant = _ELSEWHERE.get(word, "")
    is_here = meant and meant.split()[0].strip(",") in known
    return f": did you mean {meant}?" if is_here else did_you_mean(word, names)


_IS_RARE = "is_rare"


def rare(action: argparse.Action) -> None:
    """Leave an option out of the short help."""
    vars(action)[_IS_RARE] = True


def rare_options(parser: Parser, *names: str) -> None:
    """Leave the options of these names out of the short help."""
    for action in parser._actions:
        if set(names) & set(action.option_strings):
            rare(action)


def invocation(action: argparse.Action) -> str:
    """How an option or an argument is written: `-n, --lines N`."""
    value = str(action.metavar or action.dest)
    if not action.option_strings:
        return value
    names = ", ".join(action.option_strings)
    if action.nargs == 0:
        return names
    if action.choices is not None and action.metavar is None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    return f"{names} {value if action.metavar or action.choices else value.upper()}"


def _help_of(action: argparse.Action) -> str:
    return (action.help or "") % {"default": action.default}


def _rows_of(group: argparse._ArgumentGroup) -> Rows:
    actions = [each for each in group._group_actions if not isinstance(each, _SUBPARSERS)]
    return [(invocation(action), _help_of(action)) for action in actions]


_SUBPARSERS = argparse._SubParsersAction


def _command_rows(parser: Parser) -> Rows:
    return [(command.prog.split()[-1], summary) for summary, command in commands_of(parser)]


def _section(title: str, rows: Rows, write: Callable[[str, str, int], str]) -> str:
    """The lines of `rows` below their title; empty without rows."""
    if not rows:
        return ""
    column = min(_HELP_COLUMN, max(len(name) for name, _ in rows) + 4)
    lines = (write(name, text, column) for name, text in rows)
    return f"{styled(title, BOLD, sys.stdout)}:\n" + "".join(lines)


def _row(name: str, text: str, column: int) -> str:
    """A name, and its text from `column` on, which begins a line of its own if it must."""
    start, indent = f"  {name}", " " * column
    wrapped = textwrap.fill(text, _width(), initial_indent=indent, subsequent_indent=indent)
    is_long = len(start) + 2 > column
    row = f"{start}\n{wrapped}" if is_long else f"{start:<{column}}{wrapped[column:]}"
    return row.rstrip() + "\n"


def _example(text: str, line: str, _: int) -> str:
    return f"  # {text}\n  {line}\n"


def _bare_example(_: str, line: str, __: int) -> str:
    return f"  {line}\n"


def _paragraphs(texts: Sequence[str]) -> str:
    return "\n".join(textwrap.fill(text, _width()) + "\n" for text in texts if text)


def _width() -> int:
    columns = shutil.get_terminal_size().columns
    return max(_MIN_COLUMNS, min(columns, _MAX_COLUMNS))


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
