"""Writes docs/vlm-server.1, which the package installs, from the command line's parser:
`python -m tests.docs.man_page`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from tests.docs.pages import ROOT
from vlm_server.cli import exit_codes
from vlm_server.cli.main import build_parser
from vlm_server.cli.usage import Parser, commands_of, invocation

PATH = ROOT / "docs/vlm-server.1"


def render() -> str:
    """Text of the page."""
    parser = build_parser()
    return "\n".join(_lines(parser)) + "\n"


def _lines(parser: Parser) -> Iterator[str]:
    yield '.TH VLM\\-SERVER 1 "" vlm\\-server "User Commands"'
    yield ".SH NAME"
    yield f"vlm\\-server \\- {_text('serves a vision-language model over HTTP')}"
    yield ".SH SYNOPSIS"
    yield ".B vlm\\-server"
    yield "COMMAND [OPTION]... [ARGUMENT]..."
    yield ".SH DESCRIPTION"
    yield _text(parser.description or "")
    yield ".SH COMMANDS"
    for _, command in commands_of(parser):
        yield from _command(command)
    yield ".SH ENVIRONMENT"
    yield from _terms(parser.manual.environment)
    yield ".SH FILES"
    yield from _terms(parser.manual.files)
    yield ".SH EXIT STATUS"
    yield from _terms((str(code), text) for code, text in exit_codes.MEANINGS.items())


def _command(command: Parser) -> Iterator[str]:
    """One command, or those below it."""
    if commands_of(command):
        for _, each in commands_of(command):
            yield from _command(each)
        return
    usage = " ".join(command.format_usage().removeprefix("usage: ").split())
    yield f".SS {_text(command.prog)}"
    yield f".B {_text(usage)}"
    for paragraph in (command.description or "").split("\n\n"):
        yield ".PP"
        yield _text(paragraph)
    for action in command._actions:
        if action.dest not in ("help", "help_all", "debug") and action.help != argparse.SUPPRESS:
            yield ".TP"
            yield f".B {_text(invocation(action))}"
            yield _text((action.help or "") % {"default": action.default})
    for text, line in command.manual.examples:
        yield ".PP"
        yield f"{_text(text)}:"
        yield ".PP"
        yield ".nf"
        yield f"    {_text(line)}"
        yield ".fi"


def _terms(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    for name, text in rows:
        yield ".TP"
        yield f".B {_text(name)}"
        yield _text(text)


def _text(text: str) -> str:
    """`text` with troff's own characters escaped."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    escaped = escaped.replace("`", "\\(ga").replace("^", "\\(ha").replace("~", "\\(ti")
    return f"\\&{escaped}" if escaped.startswith(".") else escaped


if __name__ == "__main__":
    PATH.write_text(render())
