"""Fields that a struct does not have are named, wherever they are."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import Struct

from vlm_server.api.http.intake.ignored import MAX_NAMES, fields_without_effect


class Circle(Struct, tag_field="type", tag="circle"):
    radius: int


class Square(Struct, tag_field="type", tag="square"):
    side: int
    label: str | None = None


class Drawing(Struct):
    shapes: list[Circle | Square] | str
    title: str | None = None
    frame: Square | None = None
    anything: dict[str, Any] | None = None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"shapes": "none"}, ()),
        ({"shapes": [], "size": 1, "colour": None}, ("size",)),
        ({"shapes": [{"type": "circle", "radius": 1, "side": 2}]}, ("shapes[].side",)),
        (
            {
                "shapes": [
                    {"type": "square", "side": 1, "x": 1},
                    {"type": "circle", "radius": 1, "x": 2, "y": 3},
                ]
            },
            ("shapes[].x", "shapes[].y"),
        ),
        ({"shapes": "a", "frame": {"type": "square", "side": 1, "y": []}}, ("frame.y",)),
        ({"shapes": "a", "anything": {"x": {"y": 1}}}, ()),
        ({"shapes": "a", "a,b\r\n\u00fc": 1}, ("a?b???",)),
        ({"shapes": "a", "n" * 100: 1}, ("n" * 64,)),
    ],
)
def test_they_are_named(value: dict[str, Any], expected: tuple[str, ...]) -> None:
    msgspec.convert(value, Drawing)
    assert fields_without_effect(value, Drawing) == expected


def test_there_is_an_end_to_it() -> None:
    value = {"shapes": "a"} | {f"field{i}": i for i in range(1000)}
    named = fields_without_effect(value, Drawing)
    assert len(named) == MAX_NAMES + 1
    assert named[-1] == "..."
