"""`vlm-server serve`: its options."""

from __future__ import annotations

from pathlib import Path

from vlm_server.cli import options, usage
from vlm_server.cli.usage import Manual, Parser, rare

_MANUAL = Manual(
    examples=(
        ("The small model that comes with the program", "vlm-server serve"),
        (
            "A model by its name, which is downloaded if it is not here",
            "vlm-server serve --model mlx-community/Qwen3-VL-4B-Instruct-4bit",
        ),
        (
            "Another port, and four answers at once",
            "vlm-server serve --port 9000 --set scheduler.max_num_seqs=4",
        ),
    ),
    environment=(*usage.SETTINGS, *usage.HUB, *usage.TERMINAL),
    files=(*usage.CONFIG_FILES, *usage.HUB_FILES),
)


def add_to(parser: Parser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Serves a model until Ctrl-C: a page for browsers, and the APIs of OpenAI, Anthropic and "
        "Ollama. Without --model it is a small one that comes with the program."
        "\n\nA model that is named and not on this machine is downloaded. SIGTERM stops the "
        "daemon like Ctrl-C: running answers are finished first, and a second signal ends it."
    )
    options.add_model_option(parser)
    options.add_config_options(parser)
    address = parser.add_argument_group("address")
    address.add_argument("--host", help="address to listen on (server.host)")
    address.add_argument("--port", type=int, help="TCP port, 0 for a free one (server.port)")
    hosts = address.add_argument(
        "--hostfile",
        metavar="FILE",
        type=Path,
        help="split the model over the machines in this hostfile (distributed.hostfile)",
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="log all that is known of each request"
    )
    parser.add_argument(
        "--reload",
        action="store_true",
        help="start again, once answers are finished, at SIGHUP and when --config has changed",
    )
    managed = parser.add_argument_group("for programs that start it")
    managed.add_argument(
        "--stop-at-eof", action="store_true", help="stop when standard input is closed"
    )
    managed.add_argument(
        "--give-up-status",
        metavar="STATUS",
        type=int,
        help="exit status if a restart would not help, instead of 2 or 3 (for launchd)",
    )
    managed.add_argument(
        "--log-file", metavar="FILE", type=Path, help="write the log to FILE, and rotate it"
    )
    managed.add_argument(
        "--launchd-socket",
        metavar="NAME",
        help="take over the sockets of this name in the LaunchAgent's file",
    )
    for option in (hosts, *managed._group_actions):
        rare(option)
    parser.set_defaults(run="serve.front:run", keeps_log=True)
    parser.manual = _MANUAL
