"""docs/anthropic.md names every field, block, tool, choice and kind of error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from vlm_server.api.dialects.anthropic import errors, schema

DOCS = (Path(__file__).parents[5] / "docs" / "anthropic.md").read_text(encoding="utf-8")
STRUCTS: list[Any] = [
    value
    for value in vars(schema).values()
    if isinstance(value, type) and issubclass(value, msgspec.Struct) and value is not msgspec.Struct
]
FIELDS = {name for struct in STRUCTS for name in struct.__struct_encode_fields__}
TAGS = {struct.__struct_config__.tag for struct in STRUCTS} - {None}
EVENTS = [
    "message_start", "content_block_start", "content_block_delta", "content_block_stop",
    "text_delta", "thinking_delta", "signature_delta", "input_json_delta", "message_delta",
    "message_stop", "ping", "error",
]  # fmt: skip


def is_documented(name: str) -> bool:
    written = (f"`{name}`", f"`{name}.", f'"{name}"', f".{name}`")
    return any(spelling in DOCS for spelling in written)


def test_every_anthropic_name_is_documented() -> None:
    names = FIELDS | TAGS | {*EVENTS, *errors.TYPES.values()}
    assert [name for name in names if not is_documented(name)] == []
