"""`docs/fields.md`, made of the fields' declarations.

To write it: `.venv/bin/python -m tests.unit.api.fields.table`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.unit.api.fields.concepts import SECTIONS
from tests.unit.api.fields.dialects import ANSWERING, COUNTING, POOLING
from tests.unit.api.fields.field import Dialect, Field, Reading

PATH = Path(__file__).parents[4] / "docs" / "fields.md"
_IN_MESSAGES = re.compile(r"^(messages|input)\[\]\.")

HEAD = """# Fields

Which fields each dialect has, concept by concept. What they mean is described in
[chat.md](chat.md), [tools.md](tools.md), [pictures.md](pictures.md), [responses.md](responses.md),
[anthropic.md](anthropic.md), [ollama.md](ollama.md), [embeddings.md](embeddings.md) and
[decisions-api.md](decisions-api.md).

- A field without a note has an effect.
- *ignored*: it is accepted, has no effect, and is named in the header `X-VLM-Ignored`, *unless* it
  asks for what is done anyway.
- *refused*: 400, and the error names it. *only*: it is refused, unless it has one of these values,
  which ask for what is done anyway.
- A dash: the dialect has no such field; see [Unknown fields](#unknown-fields).

A field that may be left out may be `null`, which means the same.

This page is generated from the declarations in `tests/unit/api/fields`. For each field, a test
sends a request with and without it. If it has an effect, the request that reaches the engine or the
response differs. If it is ignored, the engine gets the same, and the header names it.
If it is refused, the error names it. Another test compares the declarations with the structs that
decode requests.

Names are paths, as in the header. Those of messages, items and what is in them are given from
the message on: `content[].text` is `messages[].content[].text`, or `input[].content[].text`.
"""

NOTES = {
    "Structured output": "All of it is *ignored* with forced calls.",
    "Thinking": "All but `chat_template_kwargs` is *ignored* for a model that does not think.",
    "Unknown fields": (
        "Parts, items and blocks of an unknown type are refused everywhere, since the prompt would "
        "lack them.\nWhat is *refused* at the top is *ignored* with "
        '`server.unknown_fields = "ignore"`.'
    ),
    "Counting": (
        "Routes that count tokens take the same requests; what does not shape the prompt is "
        "*ignored*."
    ),
}
"""What holds for all of a section."""


def page() -> str:
    """The text of the page."""
    everything = tuple(concept for concepts in SECTIONS.values() for concept in concepts)
    sections = [
        *(_section(title, concepts, ANSWERING) for title, concepts in SECTIONS.items()),
        _section("Counting", everything, COUNTING),
        _section("Vectors, scores and decisions", everything, POOLING),
    ]
    return "\n".join([HEAD, *sections])


def _section(title: str, concepts: Sequence[str], dialects: Sequence[Dialect]) -> str:
    note = f"{NOTES[title]}\n\n" if title in NOTES else ""
    table = "\n".join(_table(concepts, dialects))
    return f"## {title}\n\n{note}{table}\n"


def _table(concepts: Sequence[str], dialects: Sequence[Dialect]) -> Iterator[str]:
    yield f"| | {' | '.join(dialect.title for dialect in dialects)} |"
    yield "|---" * (len(dialects) + 1) + "|"
    for concept in concepts:
        cells = [
            _cell(field for field in dialect.fields if field.concept == concept)
            for dialect in dialects
        ]
        if any(cells):
            yield f"| {concept} | {' | '.join(cell or '-' for cell in cells)} |"


def _cell(fields: Iterable[Field]) -> str:
    """The fields of one reading, joined."""
    words = dict[str, list[str]]()
    for field in fields:
        names = words.setdefault(_words(field), [])
        if (name := _name(field)) not in names:
            names.append(name)
    return "; ".join(f"{', '.join(names)}{remark}" for remark, names in words.items())


def _name(field: Field) -> str:
    is_inside = field.concept in {
        concept
        for section in ("Messages", "Images and videos", "Documents")
        for concept in SECTIONS[section]
    }
    return field.title or f"`{_IN_MESSAGES.sub('', field.name) if is_inside else field.name}`"


def _words(field: Field) -> str:
    """The remark on fields that do not simply work."""
    neutral = ", ".join(f"`{json.dumps(value)}`" for value in field.neutral if value is not None)
    where = f" {field.where}" if field.where else ""
    match field.reading:
        case Reading.IGNORED if neutral and not where:
            return f" *ignored* unless {neutral}"
        case Reading.IGNORED:
            return f" *ignored*{where}"
        case Reading.REFUSED if neutral:
            return f" *only* {neutral}{where}"
        case Reading.REFUSED:
            return f" *refused*{where}"
    return where


if __name__ == "__main__":
    PATH.write_text(page(), encoding="utf-8")
