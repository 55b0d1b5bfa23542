"""A screen, the truth about it, and tools to use on it.

Coordinates of the embedded model run from 0 to 1000 over the image's width and height."""

from __future__ import annotations

import base64
from typing import Any, Literal

import pydantic

from tests.support.images import canvas, draw_shape, encoded

SIZE = (448, 448)
CIRCLE, STAR = (130, 110), (330, 320)
TOLERANCE = 60

COLOUR = "What colour is the circle?"
CLICK = "Click on the red circle."
LOOK = "Take a screenshot. What colour is the circle?"
DESCRIBE = "Describe the circle."
COUNT = "Count from 1 to 100."
TOO_LONG = "word " * 9000
"""More tokens than the embedded model's context has."""

POINT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 1000},
        "y": {"type": "integer", "minimum": 0, "maximum": 1000},
    },
    "required": ["x", "y"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class ShapeOnScreen(pydantic.BaseModel):
    """One shape on the screen."""

    model_config = pydantic.ConfigDict(extra="forbid")

    shape: Literal["circle", "square", "triangle", "star"]
    color: Literal["red", "green", "blue", "yellow", "orange", "purple", "black", "white"]
    count: int = pydantic.Field(ge=0, le=9)
    x: int = pydantic.Field(ge=0, le=1000)
    y: int = pydantic.Field(ge=0, le=1000)


def screenshot() -> bytes:
    """A red circle at the top left and a blue star at the bottom right, as PNG."""
    image = draw_shape(canvas(SIZE), "circle", "red", CIRCLE, 60)
    return encoded(draw_shape(image, "star", "blue", STAR, 65))


def is_at(place: tuple[int, int], x: int, y: int) -> bool:
    """Whether the model's `x` and `y` are at `place`, in pixels."""
    wanted = (1000 * place[0] / SIZE[0], 1000 * place[1] / SIZE[1])
    return max(abs(x - wanted[0]), abs(y - wanted[1])) < TOLERANCE


def is_the_circle(thing: ShapeOnScreen) -> bool:
    description = (thing.shape, thing.color, thing.count)
    return description == ("circle", "red", 1) and is_at(CIRCLE, thing.x, thing.y)


URL = f"data:image/png;base64,{base64.b64encode(screenshot()).decode()}"
"""The screenshot as most clients send it."""
