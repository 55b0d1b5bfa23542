"""TOML, edited by tomlkit, which keeps all other text."""

from __future__ import annotations

import contextlib
import re
import tomllib
from typing import Any

from vlm_server.cli.connect.tree import MISSING, Path, Unusable, get

EMPTY = ""
HAS_NAMED_ITEMS = False
_PLACE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


def parse(text: str) -> dict[str, Any]:
    """The table in `text`. Raises Unusable."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        reason = str(error)
        place = _PLACE.search(reason)
        line = int(place[1] or text.count("\n") + 1) if place else 0
        raise Unusable(_PLACE.sub("", reason), line) from None


def put(text: str, path: Path, value: Any) -> str:
    """`text` with `value` at `path`. A new key becomes the first line, a new table the last."""
    import tomlkit

    if get(parse(text), path) is MISSING:
        if not path[1:]:
            gap = "\n" if text.lstrip().startswith("[") else ""
            return f"{tomlkit.dumps({path[0]: value})}{gap}{text}"
        nested = value
        for name in reversed(path):
            nested = {name: nested}
        gap = ("" if text.endswith("\n") else "\n") + "\n" if text else ""
        new = f"{text}{gap}{tomlkit.dumps(nested)}"
        with contextlib.suppress(Unusable):  # an inline table can't be extended
            parse(new)
            return new
    document: Any = tomlkit.parse(text)
    holder = document
    for name in path[:-1]:
        holder = holder[name]
    holder[path[-1]] = value
    return tomlkit.dumps(document)


def drop(text: str, path: Path) -> str:
    """`text` without the value at `path`, which is there."""
    import tomlkit

    document: Any = tomlkit.parse(text)
    holder = document
    for name in path[:-1]:
        holder = holder[name]
    del holder[path[-1]]
    dropped = tomlkit.dumps(document)
    has_gap = dropped.endswith("\n\n") and not text.endswith("\n\n")
    return dropped[:-1] if has_gap else dropped
