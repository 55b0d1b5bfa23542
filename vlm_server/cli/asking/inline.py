"""Shows a picture within the text of a terminal that can: kitty's protocol, and iTerm2's.

https://sw.kovidgoyal.net/kitty/graphics-protocol/ and https://iterm2.com/documentation-images.html.
Which of them a terminal knows is told by its environment: asking it could leave answers in what
the next program reads.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Literal

from PIL import Image

Protocol = Literal["kitty", "iterm2"]

_MAX_SIDE_PIXELS = 1024
_MAX_COLUMNS = 60
_CHUNK_BYTES = 4096
_KITTY_PROGRAMS = ("ghostty", "WezTerm", "kitty")
_ITERM_PROGRAMS = ("iTerm.app", "mintty", "vscode", "rio")
_MULTIPLEXERS = ("tmux", "screen")


def protocol_of(environment: Mapping[str, str]) -> Protocol | None:
    """What the terminal of `environment` knows; None inside tmux and screen, which pass neither."""
    term = environment.get("TERM", "")
    if environment.get("TMUX") or term.startswith(_MULTIPLEXERS) or term in ("", "dumb"):
        return None
    program = environment.get("TERM_PROGRAM", "")
    is_kitty = environment.get("KITTY_WINDOW_ID") or term in ("xterm-kitty", "xterm-ghostty")
    if is_kitty or program in _KITTY_PROGRAMS:
        return "kitty"
    is_iterm = environment.get("LC_TERMINAL") == "iTerm2" or program in _ITERM_PROGRAMS
    return "iterm2" if is_iterm else None


def sequence(image: Image.Image, protocol: Protocol, columns: int) -> str:
    """What to write to a terminal of `columns` to show `image`."""
    small = image.copy()
    small.thumbnail((_MAX_SIDE_PIXELS, _MAX_SIDE_PIXELS))
    png = io.BytesIO()
    small.save(png, "PNG")
    data, wide = png.getvalue(), min(columns, _MAX_COLUMNS)
    encoded = base64.b64encode(data).decode()
    if protocol == "iterm2":
        return f"\x1b]1337;File=inline=1;size={len(data)};width={wide}:{encoded}\x07\n"
    chunks = [encoded[i : i + _CHUNK_BYTES] for i in range(0, len(encoded), _CHUNK_BYTES)]
    parts = []
    for number, chunk in enumerate(chunks):
        has_more = int(number < len(chunks) - 1)
        head = f"a=T,f=100,q=2,c={wide},m={has_more}" if not number else f"m={has_more}"
        parts.append(f"\x1b_G{head};{chunk}\x1b\\")
    return "".join(parts) + "\n"
