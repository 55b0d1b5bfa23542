"""`vlm-server top`: its options."""

from __future__ import annotations

import argparse

from vlm_server.cli import options, usage
from vlm_server.cli.usage import Manual, Parser

_MIN_SECONDS = 0.2
_DESCRIPTION = """\
Shows what a daemon does, from second to second: its models and their memory, the requests that \
are answered, with phase, tokens and rate, those that ended last, and percentiles of waiting times.

Keys: q leaves, p pauses, m shows another model's waiting times. Without a terminal, it is printed \
once. Where the daemon has API keys, it takes one with `admin = true`."""
_MANUAL = Manual(
    examples=(
        ("The daemon on this machine", "vlm-server top"),
        ("One on another machine", "vlm-server top --url http://mac:8000 --api-key-file key.txt"),
        ("For a script, once", "vlm-server top --once --json | jq .tokens_per_second"),
        ("For a script, every ten seconds", "vlm-server top --json --interval 10 > log.jsonl"),
    ),
    environment=usage.TERMINAL,
    files=usage.CONFIG_FILES,
)


def add_to(parser: Parser) -> None:
    """Add the options of the command."""
    parser.description = _DESCRIPTION
    parser.add_argument("--once", action="store_true", help="show it once, and exit")
    parser.add_argument(
        "--json", action="store_true", help="print objects, one a line, until Ctrl-C or once"
    )
    parser.add_argument(
        "--interval",
        type=_seconds,
        default=1.0,
        metavar="SECONDS",
        help="time between two readings (default: %(default)g)",
    )
    options.add_daemon_options(parser, "to look at")
    options.add_config_options(parser, are_rare=True)
    parser.set_defaults(run="top.run:run")
    parser.manual = _MANUAL


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected seconds, not {text!r}") from None
    if not _MIN_SECONDS <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected {_MIN_SECONDS} to 3600 seconds, not {text}")
    return seconds
