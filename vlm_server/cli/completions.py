"""`vlm-server completions`: a shell's script, made from the parser by shtab."""

from __future__ import annotations

import argparse
from pathlib import Path

from vlm_server.cli.usage import Manual, Parser, all_commands, commands_of

SHELLS = ("bash", "zsh", "fish")
_LIST_MODELS = "vlm-server models list --names 2>/dev/null"
_FOLDERS = (
    ("bash", "~/.local/share/bash-completion/completions/vlm-server"),
    ("zsh", "~/.zfunc/_vlm-server  (with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc)"),
    ("fish", "~/.config/fish/completions/vlm-server.fish"),
)
_MANUAL = Manual(
    examples=(
        ("In this bash alone", 'eval "$(vlm-server completions bash)"'),
        (
            "In bash, from now on",
            "vlm-server completions bash > ~/.local/share/bash-completion/completions/vlm-server",
        ),
        (
            "In fish, from now on",
            "vlm-server completions fish > ~/.config/fish/completions/vlm-server.fish",
        ),
    ),
    files=_FOLDERS,
)


def add_to(parser: Parser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Prints a script that completes commands, options, files, and the names of "
        "models on this machine."
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    parser.set_defaults(run="completions:run")
    parser.manual = _MANUAL


def run(arguments: argparse.Namespace) -> int:
    """Print the script for one shell."""
    print(script(arguments.shell))
    return 0


def script(shell: str) -> str:
    """The script for `shell`."""
    import shtab

    from vlm_server.cli.main import build_parser

    parser = build_parser()
    models = shtab.cmd(_LIST_MODELS)
    for level in all_commands(parser):
        for summary, command in commands_of(level):
            command.description = summary  # shown next to its name
        for action in level._actions:
            if action.dest == "model":
                vars(action)["complete"] = models  # where shtab looks for it
            elif action.type is Path or action.dest == "words":
                vars(action)["complete"] = shtab.FILE
    return shtab.complete(parser, shell)
