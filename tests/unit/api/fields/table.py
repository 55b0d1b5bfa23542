"""`docs/fields.md`, made of what is declared of the fields.

To write it: `.venv/bin/python -m tests.unit.api.fields.table`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.unit.api.fields.concepts import SECTIONS
from tests.unit.api.fields.dialects import ANSWERING, COUNTING
from tests.unit.api.fields.field import Dialect, Field, Reading

PATH = Path(__file__).parents[4] / "docs" / "fields.md"
_IN_MESSAGES = re.compile(r"^(messages|input)\[\]\.")

HEAD = """# Fields

Which fields each dialect has, concept by concept. What they mean is described in [api.md](api.md),
[responses.md](responses.md), [anthropic.md](anthropic.md) and [ollama.md](ollama.md).

- A field alone has an effect.
- *ignored*: it is taken, has no effect, and is named in the header `X-VLM-Ignored`. With values in brackets, these are
  what is done anyway, and not named.
- *refused*: 400, and the error names it. With *only*, these values, which ask for what is done anyway, are taken.
- –: the dialect has no such field.

Fields that are not here: [unknown fields](#unknown-fields).

This page is made of the declarations in `tests/unit/api/fields`. For each field, a test sends a request with and without
it: where it has an effect, the request that reaches the engine or the response differs; where it is ignored, the engine
gets the same and the header names it; where it is refused, the error does. Another test compares the declarations with
the structs that decode requests.

Names are paths, as in `X-VLM-Ignored`. Those of parts, calls and the like are told from the message or item on:
`content[].text` is `messages[].content[].text`, or `input[].content[].text`.
"""

TAIL = """## Unknown fields

| | at the top | in messages, items, parts, calls and tools | in other objects |
|---|---|---|---|
| chat completions, text completions, tokenize, detokenize | *refused*, or *ignored* by `server.unknown_fields` | *ignored* | *refused* |
| Responses | *refused*, or *ignored* by `server.unknown_fields` | *ignored* | *ignored*; in `stream_options` *refused* |
| Messages, count_tokens | *ignored* | *ignored* | *ignored* |
| Ollama | *ignored* | *ignored* | *ignored* |

Parts, items and blocks of a type that is unknown are refused everywhere, since they would be missing in the prompt.
"""


def page() -> str:
    """The whole of it."""
    parts = [HEAD]
    for section, concepts in SECTIONS.items():
        parts.append(f"## {section}\n")
        parts.append("\n".join(_table(concepts, ANSWERING)) + "\n")
    parts.append("## Counting\n")
    parts.append(
        "Requests that count a prompt take what the request for an answer takes. What does not shape the prompt\n"
        "is *ignored*.\n"
    )
    everything = [concept for concepts in SECTIONS.values() for concept in concepts]
    parts.append("\n".join(_table(everything, COUNTING)) + "\n")
    parts.append(TAIL)
    return "\n".join(parts)


def _table(concepts: Sequence[str], dialects: Sequence[Dialect]) -> Iterator[str]:
    yield f"| | {' | '.join(dialect.title for dialect in dialects)} |"
    yield "|---" * (len(dialects) + 1) + "|"
    for concept in concepts:
        cells = [
            _cell(field for field in dialect.fields if field.concept == concept)
            for dialect in dialects
        ]
        if any(cells):
            yield f"| {concept} | {' | '.join(cell or '–' for cell in cells)} |"


def _cell(fields: Iterable[Field]) -> str:
    """The fields that are read alike together."""
    words = dict[str, list[str]]()
    for field in fields:
        names = words.setdefault(_words(field), [])
        name = field.title or f"`{_IN_MESSAGES.sub('', field.name)}`"
        if name not in names:
            names.append(name)
    return "; ".join(f"{', '.join(names)}{said}" for said, names in words.items())


def _words(field: Field) -> str:
    match field.reading:
        case Reading.IGNORED:
            return f" *ignored*{_values(field.neutral, ' (', ')')}"
        case Reading.REFUSED:
            neutral = [value for value in field.neutral if value is not None]
            return _values(neutral, " *only* ") or " *refused*"
    return ""


def _values(values: Sequence[Any], before: str, after: str = "") -> str:
    shown = ", ".join(f"`{json.dumps(value)}`" for value in values)
    return f"{before}{shown}{after}" if shown else ""


if __name__ == "__main__":
    PATH.write_text(page(), encoding="utf-8")
