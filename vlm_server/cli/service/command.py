"""`vlm-server service`: the daemon as a user's background service. `actions` does the work."""

from __future__ import annotations

from vlm_server.cli import exit_codes, options
from vlm_server.cli.usage import Commands, Manual, Parser

_STARTS = {
    "install": "install the service, start it and wait for its first answer",
    "start": "start the installed service",
    "restart": "finish running answers and start again; nobody is refused meanwhile",
}
_EXAMPLES = {
    "install": (
        (
            "With settings that are read anew when they change",
            "vlm-server service install --config my.toml",
        ),
        ("What it would write", "vlm-server service install --dry-run"),
    ),
    "logs": (("And what is added", "vlm-server service logs -f"),),
}


def add_to(parser: Parser) -> None:
    """Add the options of the command."""
    actions = parser.add_subparsers(metavar="ACTION", required=True, title="actions")
    for name, text in _STARTS.items():
        start_parser = _add(actions, name, text)
        start_parser.add_argument(
            "--no-wait", action="store_true", help="do not wait for its first answer"
        )
        if name == "install":
            options.add_model_option(start_parser)
            options.add_config_options(start_parser)
            start_parser.add_argument(
                "--dry-run", action="store_true", help="print the files without installing them"
            )
    _add(actions, "stop", "stop the service until it is started, or until the next login")
    _add(actions, "uninstall", "stop the service and remove it")
    status_parser = _add(actions, "status", "show its state; exits with 0 if it is ready")
    status_parser.add_argument("--json", action="store_true", help="as a JSON object")
    status_parser.manual = Manual(exit_codes=tuple(exit_codes.SERVICE_MEANINGS.items()))
    log = _add(actions, "logs", "show the end of its log")
    log.add_argument("-f", "--follow", action="store_true", help="go on and show new lines")
    log.add_argument("-n", "--lines", type=int, default=50, help="how many lines (50)")


def _add(actions: Commands, name: str, text: str) -> Parser:
    parser = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(run="service.actions:run", action=name)
    parser.manual = Manual(_EXAMPLES.get(name, ()))
    return parser
