"""YAML, edited in place: PyYAML says where a node lies, and all other text is kept.

Only what a path of one or two names needs: a value at the top, and a named item of a list there.
"""

from __future__ import annotations

import json
from typing import Any

import yaml

from vlm_server.cli.connect.tree import UNSAFE, Path, Unusable

EMPTY = ""
HAS_NAMED_ITEMS = True


def parse(text: str) -> dict[str, Any]:
    """The mapping in `text`. Raises Unusable."""
    try:
        value = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise Unusable(str(error.problem), mark.line + 1 if mark else 0) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Unusable(" ".join(str(error).split())) from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Unusable("it is not a mapping", 1)
    return value


def put(text: str, path: Path, value: Any) -> str:
    """`text` with `value` at `path`; a new item becomes the first of its list."""
    name = path[0]
    key, node = _entry(text, name)
    if path[1:] and isinstance(node, yaml.ScalarNode):  # `null` in the place of a list
        text = text[: node.start_mark.index] + text[node.end_mark.index :]
    if key is None:
        text += "\n" if text and not text.endswith("\n") else ""
        return text + _dump({name: [value] if path[1:] else value})
    if not path[1:]:
        return text[: node.start_mark.index] + json.dumps(value) + text[node.end_mark.index :]
    if isinstance(node, yaml.SequenceNode) and (item := _item(node, path[1])) is not None:
        text = _without_item(text, node, item)
        key, node = _entry(text, name)
    if isinstance(node, yaml.SequenceNode) and node.flow_style:
        start = node.start_mark.index + 1
        comma = ", " if node.value else ""
        return text[:start] + json.dumps(value, ensure_ascii=False) + comma + text[start:]
    indent = "  "
    if isinstance(node, yaml.SequenceNode):
        indent = " " * node.start_mark.column
    lines = _dump([value]).splitlines(keepends=True)
    return _insert_lines(text, key.end_mark.line + 1, "".join(indent + line for line in lines))


def drop(text: str, path: Path) -> str:
    """`text` without the value at `path`, which is there; an emptied list is `[]`."""
    key, node = _entry(text, path[0])
    if not path[1:]:
        return _cut_lines(text, key.start_mark.line, _last_line(node))
    return _without_item(text, node, _item(node, path[1]))


def _without_item(text: str, node: Any, item: Any) -> str:
    if node.flow_style:
        others = [
            yaml.safe_load(yaml.serialize(other)) for other in node.value if other is not item
        ]
        flow = json.dumps(others, ensure_ascii=False)
        return text[: node.start_mark.index] + flow + text[node.end_mark.index :]
    if len(node.value) > 1:
        dash = text.rindex("-", 0, item.start_mark.index)
        line = len(text[: dash + 1].splitlines()) - 1  # YAML has further ends of lines
        return _cut_lines(text, line, _last_line(item))
    key_end = text.rindex(":", 0, node.start_mark.index) + 1
    text = _cut_lines(text, node.start_mark.line, _last_line(item))
    return f"{text[:key_end]} []{text[key_end:]}"


def _entry(text: str, name: str) -> tuple[Any, Any]:
    """The nodes of a key at the top, and of its value; None for both if it is not there.

    Raises Unusable if an edit before has broken the text.
    """
    try:
        root: Any = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError:
        raise Unusable(UNSAFE) from None
    entries = root.value if isinstance(root, yaml.MappingNode) else ()
    return next((entry for entry in entries if entry[0].value == name), (None, None))


def _item(node: Any, name: str) -> Any:
    for item in node.value:
        fields = item.value if isinstance(item, yaml.MappingNode) else ()
        if any(key.value == "name" and value.value == name for key, value in fields):
            return item
    return None


def _last_line(node: Any) -> int:
    """The last line of the node's text, from 0; the end of a block would be that of its gap."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _last_line(last[1] if isinstance(node, yaml.MappingNode) else last)
    is_at_next_line = node.end_mark.column == 0 and node.end_mark.line > node.start_mark.line
    return int(node.end_mark.line - is_at_next_line)


def _insert_lines(text: str, number: int, new: str) -> str:
    lines = text.splitlines(keepends=True)
    if number == len(lines) and not text.endswith("\n"):
        new = f"\n{new}"
    return "".join([*lines[:number], new, *lines[number:]])


def _cut_lines(text: str, first: int, last: int) -> str:
    lines = text.splitlines(keepends=True)
    return "".join(lines[:first] + lines[last + 1 :])


def _dump(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=1000)
