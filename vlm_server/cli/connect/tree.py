"""Values in a parsed settings file, by their path.

A path has a name for each level. In a list, a name is that of the item whose `name` it is.
"""

from __future__ import annotations

from typing import Any, TypeAlias

Path: TypeAlias = tuple[str, ...]
MISSING: Any = object()
UNSAFE = "it is written in a way that can't be changed safely"


class Unusable(ValueError):
    """A settings file can't be changed: its text is broken, or has another shape than expected.

    `line` counts from 1; 0 if the whole file is meant.
    """

    def __init__(self, reason: str, line: int = 0) -> None:
        super().__init__(reason)
        self.line = line


def get(tree: Any, path: Path) -> Any:
    """The value at `path`, or `MISSING`."""
    for name in path:
        if isinstance(tree, list):
            tree = next((item for item in tree if _is_named(item, name)), MISSING)
        else:
            tree = tree.get(name, MISSING) if isinstance(tree, dict) else MISSING
    return tree


def put(tree: Any, path: Path, value: Any, *, in_list: bool) -> None:
    """Set the value at `path`; an item of a list becomes its first. Raises Unusable.

    A missing level above it becomes a list if `in_list`, else a table.
    """
    name, *rest = path
    if isinstance(tree, list):
        if rest or not isinstance(value, dict):
            raise Unusable(f"{name} is not what its place holds")
        if (old := get(tree, (name,))) is not MISSING:
            tree.remove(old)
        tree.insert(0, value)
    elif not isinstance(tree, dict):
        raise Unusable(f"what holds {name} is of another type")
    elif not rest:
        tree[name] = value
    else:
        if tree.get(name) is None:
            tree[name] = [] if in_list else {}
        put(tree[name], tuple(rest), value, in_list=in_list)


def drop(tree: Any, path: Path) -> None:
    """Remove the value at `path`, which is there."""
    *above, name = path
    holder = get(tree, tuple(above))
    if isinstance(holder, list):
        holder.remove(get(holder, (name,)))
    else:
        del holder[name]


def _is_named(item: Any, name: str) -> bool:
    return isinstance(item, dict) and item.get("name") == name
