"""What several commands' help says: environment, files, and the overview of the program."""

from __future__ import annotations

import argparse

from vlm_server.cli.usage.parsing import Manual, Parser

HUB = (
    ("HF_TOKEN", "Token for private and gated models; `hf auth login` stores one."),
    ("HF_ENDPOINT", "Another hub than https://huggingface.co."),
    ("HF_HUB_OFFLINE", "1: nothing is downloaded."),
    ("HF_HOME, HF_HUB_CACHE", "Where downloaded models are kept."),
)
TERMINAL = (
    ("NO_COLOR", "If set, no colours."),
    ("TERM", "dumb: plain lines, no moving progress."),
)
HUB_FILES = (("~/.cache/huggingface/hub", "Downloaded models, unless HF_HOME says otherwise."),)
CONFIG_FILES = (
    ("FILE of --config", "Settings in TOML; `vlm-server check-config --print-defaults` has all."),
)

OVERVIEW = Manual(
    examples=(
        ("Serve the small model that comes with the program", "vlm-server serve"),
        ("Ask about a picture", 'vlm-server ask picture.png "What shape is this?"'),
        ("What a command takes", "vlm-server ask --help"),
        (
            "Complete commands in bash, from now on",
            "vlm-server completions bash > ~/.local/share/bash-completion/completions/vlm-server",
        ),
    ),
    environment=(*HUB, *TERMINAL),
    files=(*CONFIG_FILES, *HUB_FILES),
)


def add(parser: argparse.ArgumentParser, manual: Manual) -> None:
    """Add `manual` to the help of one command."""
    if isinstance(parser, Parser):  # a test may use one of argparse's own
        parser.manual = manual
