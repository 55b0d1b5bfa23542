"""The program `vlm-server`: its commands and exit codes.

Exit codes: 0 success, 1 failure, 2 wrong arguments or settings, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vlm_server import __version__
from vlm_server.cli import ask, check_config, serve
from vlm_server.cli.bench import command as bench
from vlm_server.cli.service import command as service
from vlm_server.errors import ConfigError, VlmServerError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `arguments` default to `sys.argv`."""
    options = build_parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except ConfigError as error:
        return _fail(error, 2)
    except VlmServerError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; it sets `run` to the command's function."""
    parser = argparse.ArgumentParser(
        prog="vlm-server",
        description="Serves a vision-language model over HTTP, and asks it questions.",
    )
    parser.add_argument("--version", action="version", version=f"vlm-server {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (serve, ask, check_config, service, bench):
        command.add_to(commands)
    return parser


def _fail(error: VlmServerError, code: int) -> int:
    print(f"vlm-server: {error}", file=sys.stderr)
    return code
