"""The commands `models list`, `models check`, `models rm` and `pull` (or `models pull`)."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from vlm_server.cli import options, usage
from vlm_server.cli.usage import Manual

if TYPE_CHECKING:
    from vlm_server.cli.options import Commands

_NAME = "mlx-community/Qwen3-VL-4B-Instruct-4bit"
_PULL = "download a model, if it can be served here"
_CHECK = "say what a model is and needs, load it, and ask it about pictures"
_EXAMPLES = {
    "pull": (("A model, or its newest version", f"vlm-server pull {_NAME}"),),
    "check": (
        ("A folder", "vlm-server models check ./my-checkpoint"),
        ("What it is, without loading it", f"vlm-server models check --no-load {_NAME}"),
    ),
    "rm": (("Without being asked", f"vlm-server models rm --yes {_NAME}"),),
}


def add_to(commands: Commands) -> None:
    """Add the commands to the command line."""
    _add(commands, "pull", _PULL)
    models = commands.add_parser("models", help="list, check, download and remove models")
    actions = models.add_subparsers(metavar="ACTION", required=True, title="actions")
    text = "the models on this machine, and those that a running daemon serves"
    listing = actions.add_parser("list", help=text, description=text.capitalize() + ".")
    listing.add_argument("--names", action="store_true", help="print only their names")
    listing.add_argument("--json", action="store_true", help="print a list of objects")
    options.add_daemon_options(listing, "whose models to list")
    options.add_config_options(listing)
    listing.set_defaults(run=_run, action="list_models")
    usage.add(listing, Manual(environment=usage.HUB, files=usage.HUB_FILES))
    _add(actions, "pull", _PULL)
    checking = _add(actions, "check", _CHECK)
    checking.add_argument("--no-load", action="store_true", help="do not load or ask it")
    removing = _add(actions, "rm", "remove a model from the hub's cache")
    removing.add_argument("--yes", "-y", action="store_true", help="do not ask")


def _add(commands: Commands, name: str, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text.capitalize() + ".")
    also = ", or a folder" if name == "check" else ""
    parser.add_argument("model", metavar="NAME", help=f"ORG/NAME or ORG/NAME@REVISION{also}")
    if name in ("pull", "check"):
        options.add_unchecked_option(parser)
    if name == "check":
        options.add_template_option(parser)
    options.add_config_options(parser)
    parser.set_defaults(run=_run, action={"rm": "remove"}.get(name, name))
    files = (*usage.CONFIG_FILES, *usage.HUB_FILES)
    environment = (*usage.HUB, *usage.TERMINAL)
    usage.add(parser, Manual(_EXAMPLES[name], environment, files))
    return parser


def _run(arguments: argparse.Namespace) -> int:
    from vlm_server.cli import model_actions  # takes a moment

    return int(getattr(model_actions, arguments.action)(arguments))
