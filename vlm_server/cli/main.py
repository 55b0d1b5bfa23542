"""The program `vlm-server`. Knows its commands and exit codes; each command has a module.

Exit codes: 0 done, 1 the work failed, 2 the arguments or the settings are wrong,
130 interrupted.
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
    """Run one command; `arguments` are those of the process unless given."""
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
    """The parser of the whole command line; `run` holds the chosen command's function."""
    parser = argparse.ArgumentParser(
        prog="vlm-server",
        description="Keeps a vision-language model ready and answers questions about pictures.",
    )
    parser.add_argument("--version", action="version", version=f"vlm-server {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (serve, ask, check_config, service):
        command.add_to(commands)
    bench_parser = commands.add_parser("bench", help="compare servers by asking them the same")
    bench.add_arguments(bench_parser)
    bench_parser.set_defaults(run=bench.run)
    return parser


def _fail(error: VlmServerError, code: int) -> int:
    print(f"vlm-server: {error}", file=sys.stderr)
    return code
