"""The commands `models list`, `models check`, `models rm` and `pull` (or `models pull`)."""

from __future__ import annotations

from pathlib import Path

from vlm_server.cli import options, usage
from vlm_server.cli.usage import Manual, Parser

_NAME = "mlx-community/Qwen3-VL-4B-Instruct-4bit"
_PULL = "download a model, if it can be served here"
_CHECK = "say what a model is and needs, load it, and ask it test questions"
_REMOVE = "remove a model from the hub's cache"
_EXAMPLES = {
    "pull": (("A model, or its newest version", f"vlm-server pull {_NAME}"),),
    "check": (
        ("A folder", "vlm-server models check ./my-checkpoint"),
        (
            "A LoRA adapter of it",
            "vlm-server models check ./my-checkpoint --adapter ./my-adapter",
        ),
        ("What it is, without loading it", f"vlm-server models check --no-load {_NAME}"),
    ),
    "rm": (("Without being asked", f"vlm-server models rm --yes {_NAME}"),),
}


def add_pull(parser: Parser) -> None:
    """Add the options of `pull`."""
    parser.description = f"{_PULL.capitalize()}."
    parser.add_argument("model", metavar="NAME", help="ORG/NAME or ORG/NAME@REVISION")
    options.add_unchecked_option(parser)
    _end(parser, "pull", "pull")


def add_to(parser: Parser) -> None:
    """Add the actions of `models`."""
    actions = parser.add_subparsers(metavar="ACTION", required=True, title="actions")
    text = "the models on this machine, and those that a running daemon serves"
    listing = actions.add_parser("list", help=text, description=f"{text.capitalize()}.")
    listing.add_argument("--names", action="store_true", help="print only their names")
    listing.add_argument("--json", action="store_true", help="print a list of objects")
    options.add_daemon_options(listing, "whose models to list")
    options.add_config_options(listing, are_rare=True)
    listing.set_defaults(run="model_actions:list_models")
    listing.manual = Manual(environment=usage.HUB, files=usage.HUB_FILES)
    add_pull(actions.add_parser("pull", help=_PULL))
    checking = actions.add_parser("check", help=_CHECK, description=f"{_CHECK.capitalize()}.")
    checking.add_argument(
        "model", metavar="NAME", help="ORG/NAME or ORG/NAME@REVISION, or a folder"
    )
    options.add_unchecked_option(checking)
    options.add_template_option(checking)
    checking.add_argument(
        "--adapter",
        metavar="FOLDER",
        type=Path,
        action="append",
        default=[],
        help="a LoRA adapter to check with it; may be repeated",
    )
    _end(checking, "check", "check")
    checking.add_argument("--no-load", action="store_true", help="do not load or ask it")
    removing = actions.add_parser("rm", help=_REMOVE, description=f"{_REMOVE.capitalize()}.")
    removing.add_argument("model", metavar="NAME", help="ORG/NAME or ORG/NAME@REVISION")
    _end(removing, "rm", "remove")
    removing.add_argument("--yes", "-y", action="store_true", help="do not ask")


def _end(parser: Parser, name: str, action: str) -> None:
    options.add_config_options(parser)
    parser.set_defaults(run=f"model_actions:{action}")
    files = (*usage.CONFIG_FILES, *usage.HUB_FILES)
    parser.manual = Manual(_EXAMPLES[name], (*usage.HUB, *usage.TERMINAL), files)
