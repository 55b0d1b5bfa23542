"""How long Ollama's clients want a model to stay loaded.

As https://github.com/ollama/ollama/blob/main/docs/faq.md has it: a number of seconds or a duration
of Go's, `5m` or `1h30m`; below 0 is for ever, and 0 unloads it at once.
"""

from __future__ import annotations

import math
import re

from vlm_server.errors import InvalidRequest
from vlm_server.settings import quantities

_NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]*)?")
_MAX_CHARS = 64
_FOR_EVER = -1.0
_MAX_SECONDS = 10 * 365 * 86400.0


def seconds_of(wanted: float | str | None) -> float | None:
    """Seconds, -1 for ever; None if nothing is wanted. Raises InvalidRequest."""
    if wanted is None or wanted == "":
        return None
    seconds = _duration(wanted) if isinstance(wanted, str) else float(wanted)
    if seconds is None or math.isnan(seconds):
        raise InvalidRequest(
            "`keep_alive` must be a number of seconds, or a duration such as '5m'.", "keep_alive"
        )
    return _FOR_EVER if seconds < 0 or seconds > _MAX_SECONDS else seconds


def _duration(text: str) -> float | None:
    if len(text) > _MAX_CHARS:
        return None
    if _NUMBER.fullmatch(text):
        return float(text)
    unsigned = text.removeprefix("-")
    try:
        seconds = quantities.seconds(unsigned)
    except ValueError:
        return None
    return seconds if unsigned == text else -seconds
