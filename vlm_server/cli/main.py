"""The program `vlm-server`: its commands, and the exit codes of their errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vlm_server import __version__
from vlm_server.cli import ask, check_config, exit_codes, serve
from vlm_server.cli.bench import command as bench
from vlm_server.cli.doctor import command as doctor
from vlm_server.cli.models import command as models
from vlm_server.cli.service import command as service
from vlm_server.errors import ConfigError, ModelLoadError, NotAvailable, VlmServerError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `arguments` default to `sys.argv`."""
    options = build_parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except NotAvailable as error:
        return _fail(error, exit_codes.NOT_AVAILABLE)
    except ConfigError as error:
        return _fail(error, _final(options, exit_codes.WRONG_SETTINGS))
    except ModelLoadError as error:
        return _fail(error, _final(options, exit_codes.MODEL_UNUSABLE))
    except VlmServerError as error:
        return _fail(error, exit_codes.FAILURE)
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; it sets `run` to the command's function."""
    parser = argparse.ArgumentParser(
        prog="vlm-server",
        description="Serves a vision-language model over HTTP, and asks it questions.",
    )
    parser.add_argument("--version", action="version", version=f"vlm-server {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (serve, ask, models, check_config, doctor, service, bench):
        command.add_to(commands)
    return parser


def _final(options: argparse.Namespace, code: int) -> int:
    """`code`, or what `--give-up-status` says instead for an error that a restart does not mend."""
    wanted: int | None = getattr(options, "give_up_status", None)
    return code if wanted is None else wanted


def _fail(error: VlmServerError, code: int) -> int:
    print(f"vlm-server: {error}", file=sys.stderr)
    return code
