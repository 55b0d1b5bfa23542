"""The program `vlm-server`: its commands, and the exit codes of their errors."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from vlm_server.cli import exit_codes, usage
from vlm_server.cli.text import say
from vlm_server.cli.usage import Parser
from vlm_server.errors import ConfigError, ModelLoadError, NotAvailable, VlmServerError

_PACKAGE = "vlm_server.cli"
_OF_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
_CODES: dict[type[BaseException], int] = {
    NotAvailable: exit_codes.NOT_AVAILABLE,
    ConfigError: exit_codes.WRONG_SETTINGS,
    ModelLoadError: exit_codes.MODEL_UNUSABLE,
    VlmServerError: exit_codes.FAILURE,
    OSError: exit_codes.FAILURE,
    BaseException: exit_codes.DEFECT,
}
"""Exit codes of errors, more specific types first."""
COMMANDS = {
    "serve": ("serve.command:add_to", "start the daemon"),
    "ask": ("ask.command:add_to", "ask about images and videos"),
    "pull": ("models:add_pull", "download a model, if it can be served here"),
    "models": ("models:add_to", "list, check, download and remove models"),
    "ps": ("ps:add_to", "show what a daemon has loaded and is doing"),
    "top": ("top.command:add_to", "watch what a daemon is doing, from second to second"),
    "connect": ("connect.command:add_to", "make other programs use a daemon"),
    "check-config": ("check_config:add_to", "validate the settings without starting"),
    "doctor": ("doctor.command:add_to", "find out what is wrong, and what to do about it"),
    "service": ("service.command:add_to", "run the daemon in the background, from login"),
    "bench": ("bench.command:add_to", "compare the speed of servers"),
    "completions": ("completions:add_to", "print the completions for a shell"),
}
"""Place of the function that adds a command's options to a parser, and its line in the overview."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `arguments` default to `sys.argv`."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = argparse.Namespace(debug="--debug" in words)
    try:
        options = build_parser(words).parse_args(words)
        code = int(import_function(options.run)(options))
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  a person gets one line
        return report(error, options)
    except SystemExit:  # argparse has said why
        try:
            sys.stdout.flush()
        except OSError as error:
            return report(error, options)
        raise
    return code


def build_parser(words: Sequence[str] | None = None) -> Parser:
    """The parser of the command line; it sets `run` to the place of the command's function.

    Only the command that `words` begin with is imported; all, if they are None.
    """
    parser = Parser(
        prog="vlm-server",
        description="Serves vision-language models on this machine, and asks them questions.",
    )
    parser.manual = usage.OVERVIEW
    version = f"vlm-server {_version()}" if "--version" in (words or ()) else ""
    parser.others.add_argument(
        "--version", action="version", version=version, help="show the version and exit"
    )
    parser.set_defaults(debug=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, title="commands")
    command = next((word for word in words or () if not word.startswith("-")), "")
    for name, (place, summary) in COMMANDS.items():
        command_parser = commands.add_parser(name, help=summary)
        if words is None or name == command:
            import_function(place)(command_parser)
    return parser


def import_function(place: str) -> Callable[..., Any]:
    """Function at `MODULE:FUNCTION` of this package, imported only now."""
    module, _, function = place.partition(":")
    imported_function: Callable[..., Any] = getattr(import_module(f"{_PACKAGE}.{module}"), function)
    return imported_function


def report(error: BaseException, options: argparse.Namespace) -> int:
    """Print the error in one line, with a traceback under --debug; returns the exit code."""
    if isinstance(error, BrokenPipeError):
        discard_output()
        return exit_codes.CLOSED_PIPE
    if isinstance(error, KeyboardInterrupt):
        return exit_codes.INTERRUPTED
    code = code_of(error)
    if options.debug or (code == exit_codes.DEFECT and hasattr(options, "keeps_log")):
        import traceback

        traceback.print_exception(error)
    details = getattr(error, "details", "") if options.debug else ""
    with contextlib.suppress(OSError):
        sys.stderr.write(details)
        for line in _lines_of(error, code):
            say(line, "vlm-server: ")
    if isinstance(error, OSError):
        discard_output()  # flushing would fail again at the end
    status: int | None = getattr(options, "give_up_status", None)
    return code if status is None or code not in exit_codes.FINAL else status


def code_of(error: BaseException) -> int:
    """The exit code of `error`."""
    return next(code for kind, code in _CODES.items() if isinstance(error, kind))


def _lines_of(error: BaseException, code: int) -> list[str]:
    """What to say about `error`: a line for each of its faults."""
    if isinstance(error, OSError) and error.strerror:
        where = "can't write the output" if error.errno in _OF_OUTPUT else "it failed"
        return [f"{error.filename or where}: {error.strerror}"]
    if isinstance(error, VlmServerError):
        return [" ".join(str(fault).split("\n")) for fault in error.args]
    text = " ".join(str(error).split("\n"))
    if code == exit_codes.DEFECT:
        text = f"this is a defect ({type(error).__name__}: {text}); --debug shows where it is"
    return [text]


def discard_output() -> None:
    """Redirect stdout to /dev/null: Python would otherwise fail to flush it at the end."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _version() -> str:
    from vlm_server import __version__  # slow to import

    return __version__
