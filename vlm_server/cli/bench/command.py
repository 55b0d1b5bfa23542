"""`vlm-server bench`: its options."""

from __future__ import annotations

import argparse
from pathlib import Path

from vlm_server.cli import usage
from vlm_server.cli.bench.words import SCENARIOS as SCENARIO_WORDS
from vlm_server.cli.usage import Manual, Parser, rare_options

# The keys of `servers.KINDS` and `scenarios.SCENARIOS`: help imports neither.
KINDS = ("ours", "mlx-vlm")
USUAL = (
    *("repeat", "question", "agent", "agent-window", "agent-drops"),
    *("stall", "conc", "text", "right"),
)
"""Scenarios that run unless others are named."""
SCENARIOS = (*USUAL, "streams", "longagent", "agents4", "small-mac", "day")
_RARE = ("--set", "--api-key-file", "--drafts", "--minutes", "--size", "--seed", "--timeout")
_DESCRIPTION = """\
Plays what people and agents do, and prints in one table how fast a server answers. Without --url \
or --start it measures the daemon that runs here; several servers get the same requests in turn, \
and are compared with the first."""
_MANUAL = Manual(
    examples=(
        ("How fast is the daemon that runs here?", "vlm-server bench"),
        (
            "How fast is it next to mlx-vlm's server, with the same model?",
            "vlm-server bench --start mlx-vlm --start ours --model ORG/NAME --json all.json",
        ),
    ),
    environment=usage.TERMINAL,
    files=(*usage.CONFIG_FILES, *usage.HUB_FILES),
)


def add_to(parser: Parser) -> None:
    """Add the options of the command."""
    lines = "; ".join(f"{name}: {SCENARIO_WORDS[name].title}" for name in SCENARIOS)
    parser.description = f"{_DESCRIPTION}\n\nThe scenarios are {lines}."
    _add_servers(parser.add_argument_group("servers"))
    work = parser.add_argument_group("work")
    work.add_argument(
        "--scenarios",
        default=",".join(USUAL),
        metavar="A,B",
        help=f"of {', '.join(SCENARIOS)}, in this order (default: all up to {USUAL[-1]}; "
        "--help-all says what they are)",
    )
    work.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="how often each is run (default: %(default)s)",
    )
    work.add_argument(
        "--minutes",
        type=float,
        default=60,
        metavar="N",
        help="how long the scenario day is (default: %(default)s)",
    )
    work.add_argument(
        "--size", default="560x420", metavar="WxH", help="size of pictures (default: %(default)s)"
    )
    work.add_argument(
        "--seed", type=int, help="of pictures and words (default: a new one, unknown to caches)"
    )
    work.add_argument(
        "--timeout",
        type=_seconds,
        default=600.0,
        metavar="S",
        help="per request, in seconds or as 5m (default: %(default)g)",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write all measurements; -: print them instead",
    )
    parser.set_defaults(run="bench.run:run")
    rare_options(parser, *_RARE)
    parser.manual = _MANUAL


def _add_servers(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--start",
        action="append",
        default=[],
        choices=KINDS,
        help="start this server with --model; may be repeated",
    )
    what = "checkpoint for --start: a folder, or a name"
    group.add_argument("--model", metavar="NAME", help=what)
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SETTING=VALUE",
        help="a setting for --start ours, such as memory.max_bytes=4GiB; may be repeated",
    )
    group.add_argument(
        "--drafts",
        choices=("on", "off"),
        default="on",
        help="whether --start ours drafts tokens (default: %(default)s); a random model repeats "
        "itself, which flatters drafts",
    )
    group.add_argument(
        "--url",
        action="append",
        default=[],
        metavar="NAME=URL[,MODEL]",
        help="a server, as ours=http://mac:8000/v1; may be repeated",
    )
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file with the API key of running servers (default for the daemon that runs here: "
        "the first of the settings')",
    )


def _seconds(text: str) -> float:
    from vlm_server.settings.quantities import seconds_or_number

    try:
        return seconds_or_number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
