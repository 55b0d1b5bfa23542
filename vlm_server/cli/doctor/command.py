"""`vlm-server doctor`: its options; docs/doctor.md describes it."""

from __future__ import annotations

from vlm_server.cli import options
from vlm_server.cli.usage import Parser


def add_to(parser: Parser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Looks at the machine, the settings, the service and the running daemon, asks "
        "one question about a picture, and says what to do about each thing that is wrong."
    )
    options.add_config_options(parser)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    tests = parser.add_mutually_exclusive_group()
    tests.add_argument(
        "--embedded", action="store_true", help="ask the embedded model, in a daemon of its own"
    )
    tests.add_argument("--no-self-test", action="store_true", help="load and ask no model")
    parser.set_defaults(run="doctor.examine:examine")
