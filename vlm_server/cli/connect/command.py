"""`vlm-server connect`: options."""

from __future__ import annotations

from vlm_server.cli import options, usage
from vlm_server.cli.usage import Manual, Parser

WRITTEN = ("claude-code", "codex", "continue", "opencode", "zed")
ENTERED = ("cline", "home-assistant", "open-webui")
_MANUAL = Manual(
    examples=(
        ("Which programs are here, and which are connected", "vlm-server connect"),
        ("Use the daemon on this machine in Claude Code", "vlm-server connect claude-code"),
        ("As it was before", "vlm-server connect claude-code --undo"),
        ("What to enter in Open WebUI", "vlm-server connect open-webui"),
    ),
    environment=(
        ("CLAUDE_CONFIG_DIR, CODEX_HOME", "Where Claude Code's and Codex's settings are."),
        ("CONTINUE_GLOBAL_DIR, OPENCODE_CONFIG", "Where Continue's and OpenCode's are."),
        ("XDG_CONFIG_HOME", "Where OpenCode's and Zed's are; default ~/.config."),
        ("XDG_STATE_HOME", "Where the settings as they were are kept; default ~/.local/state."),
    ),
    files=(
        ("~/.local/state/vlm-server/connect", "Changed files as they were, for --undo."),
        *usage.CONFIG_FILES,
    ),
)


def add_to(parser: Parser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Writes the settings of a program so that it uses a running daemon: the change is shown "
        "and confirmed first. Of programs that keep their settings themselves, it prints what to "
        "enter. Without CLIENT, it lists the programs that it knows."
    )
    parser.usage = "vlm-server connect [OPTION]... [CLIENT]"
    parser.add_argument(
        "client",
        metavar="CLIENT",
        nargs="?",
        choices=(*WRITTEN, *ENTERED),
        help=f"written: {', '.join(WRITTEN)}; printed: {', '.join(ENTERED)}",
    )
    parser.add_argument("--model", metavar="NAME", help="the model to use, if several are served")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--print", action="store_true", help="only print, and write nothing")
    ways.add_argument("--yes", "-y", action="store_true", help="do not ask")
    parser.add_argument("--undo", action="store_true", help="take exactly this change back")
    options.add_daemon_options(parser, "to use")
    options.add_config_options(parser, are_rare=True)
    parser.set_defaults(run="connect.run:run")
    parser.manual = _MANUAL
