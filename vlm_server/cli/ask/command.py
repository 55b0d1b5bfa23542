"""`vlm-server ask`: its options."""

from __future__ import annotations

from pathlib import Path

from vlm_server.cli import options, usage
from vlm_server.cli.usage import Manual, Parser, rare_options

_DESCRIPTION = """\
Answers a question about pictures, videos and PDFs, as it is written. It asks the daemon that \
runs, or starts one for this question alone. "-" is standard input: as FILE a picture, as QUESTION \
the question.

Without a question, it is read from standard input. At a terminal this begins a conversation, in \
which each question knows those before: drop pictures on the window, complete with Tab, stop an \
answer with Ctrl-C; /help lists what else there is. What you type is kept for the Up key, in a \
file that only you can read; what was answered is kept until you leave, unless you /save it.

On a terminal, answers are shown as Markdown; in a pipe they are the bare text. Boxes and points \
in an answer are drawn on the last picture: by --save-boxes into a file, and in \
terminals that show pictures (kitty, Ghostty, WezTerm, iTerm2) below the answer."""

_RARE = ("--parameter", "--plain", "--stats", "--no-history")
_MANUAL = Manual(
    examples=(
        ("A question about two pictures", 'vlm-server ask a.png b.png "Which one is larger?"'),
        ("A conversation, here about a picture", "vlm-server ask picture.png"),
        (
            "A picture from another program",
            'cat picture.png | vlm-server ask - "What shape is this?"',
        ),
        ("A question from another program", "vlm-server ask picture.png < question.txt"),
        ("A question about a document", 'vlm-server ask report.pdf "What does page 2 say?"'),
        (
            "What a program can read",
            'vlm-server ask --json picture.png "What shape is this?" | jq .usage',
        ),
        (
            "What was found, marked on the picture",
            'vlm-server ask --save-boxes found.png picture.png "Where is the red circle?"',
        ),
    ),
    environment=(*usage.HUB, *usage.TERMINAL),
    files=(
        *usage.CONFIG_FILES,
        *usage.HUB_FILES,
        ("~/.local/state/vlm-server/ask-history", "What was typed in conversations, bounded."),
    ),
)


def add_to(parser: Parser) -> None:
    """Add the options of the command."""
    parser.description = _DESCRIPTION
    parser.usage = "vlm-server ask [OPTION]... [FILE]... [QUESTION]"
    parser.add_argument(
        "words",
        metavar="FILE... QUESTION",
        nargs="*",
        help="the last word is the question, unless it is a file",
    )
    answer = parser.add_argument_group("answer")
    answer.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    answer.add_argument(
        "--parameter",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="such as temperature=0.2, seed=7 or reasoning=low (/set lists them); may be repeated",
    )
    answer.add_argument("--system", metavar="TEXT", help="instructions for all answers")
    answer.add_argument(
        "--json", action="store_true", help="print one object: answer, usage, timings, regions"
    )
    answer.add_argument(
        "--save-boxes",
        metavar="FILE",
        type=Path,
        help="write the last picture there, with the answer's boxes and points (.png, .jpg, .webp)",
    )
    shown = parser.add_argument_group("terminal")
    shown.add_argument("--plain", action="store_true", help="show the bare text, no Markdown")
    shown.add_argument("--stats", action="store_true", help="print the answer's figures, to stderr")
    shown.add_argument(
        "--no-history",
        dest="history",
        action="store_false",
        help="do not keep what is typed in a conversation",
    )
    options.add_daemon_options(parser, "to ask")
    options.add_model_option(parser)
    options.add_config_options(parser, are_rare=True)
    parser.set_defaults(run="ask.run:run")
    rare_options(parser, *_RARE)
    parser.manual = _MANUAL
