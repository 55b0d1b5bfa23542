"""The embedded model tells the truth about pictures, through the whole daemon."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from PIL import Image, ImageDraw

from tests.daemons import Daemon
from tests.e2e.pictures import canvas, draw_shape, image_part, one_shape, user, word

pytestmark = pytest.mark.e2e


def ask(daemon: Daemon, *content: Any, history: tuple[dict[str, Any], ...] = ()) -> str:
    answer = daemon.client().chat.completions.create(
        model="default", messages=[*history, user(*content)], temperature=0, max_tokens=60
    )
    return answer.choices[0].message.content.strip()


@pytest.mark.parametrize("shape", ["circle", "square", "triangle", "star"])
@pytest.mark.parametrize("size", [(448, 448), (640, 360), (200, 260)])
def test_names_the_shape(daemon: Daemon, shape: str, size: tuple[int, int]) -> None:
    picture = one_shape(shape, "blue", size, background=(240, 240, 225))
    assert ask(daemon, picture, "What shape is this?") == shape


@pytest.mark.parametrize(
    "color", ["red", "green", "blue", "yellow", "orange", "purple", "black", "white"]
)
def test_names_the_color(daemon: Daemon, color: str) -> None:
    background = (90, 100, 110) if color in ("white", "black") else "white"
    picture = one_shape("circle", color, background=background)
    assert ask(daemon, picture, "What colour is the circle?") == color


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_counts(daemon: Daemon, count: int) -> None:
    picture = canvas()
    for center in [(110, 120), (330, 110), (120, 330), (335, 340)][:count]:
        draw_shape(picture, "square", "green", center, 55)
    assert ask(daemon, picture, "How many squares are there?") == str(count)


@pytest.mark.parametrize(
    ("place", "center"),
    [
        ("left", (80, 224)),
        ("right", (368, 224)),
        ("top", (224, 80)),
        ("bottom", (224, 368)),
        ("middle", (224, 224)),
    ],
)
def test_says_where(daemon: Daemon, place: str, center: tuple[int, int]) -> None:
    picture = draw_shape(canvas(), "star", "red", center, 60)
    assert ask(daemon, picture, "Where is the star?") == place


@pytest.mark.parametrize(("color", "answer"), [("red", "yes"), ("green", "no")])
def test_answers_yes_or_no(daemon: Daemon, color: str, answer: str) -> None:
    picture = one_shape("triangle", "red")
    assert ask(daemon, picture, f"Is there a {color} triangle?") == answer


@pytest.mark.parametrize("text", ["HELLO", "river", "4711", "Invoice"])
def test_reads(daemon: Daemon, text: str) -> None:
    assert ask(daemon, word(text), "What does the text say?") == text


def test_describes(daemon: Daemon) -> None:
    description = ask(daemon, one_shape("star", "purple"), "Describe the picture.").lower()
    assert "purple star" in description


@pytest.mark.parametrize(("circle_first", "answer"), [(True, "first"), (False, "second")])
def test_tells_two_pictures_apart(daemon: Daemon, circle_first: bool, answer: str) -> None:
    circle, square = one_shape("circle", "red"), one_shape("square", "blue", (320, 240))
    pair = (circle, square) if circle_first else (square, circle)
    assert answer in ask(daemon, *pair, "Which picture has a circle?").lower()


def test_follows_a_conversation(daemon: Daemon) -> None:
    picture = draw_shape(canvas(), "triangle", "orange", (80, 224), 60)
    history = (
        user(picture, "What shape is this?"),
        {"role": "assistant", "content": "triangle"},
    )
    assert ask(daemon, "What colour is it?", history=history) == "orange"
    assert ask(daemon, "Where is it?", history=history) == "left"


def test_turns_a_photo_upright(daemon: Daemon) -> None:
    """EXIF orientation 6: stored lying on its side, to be shown turned clockwise."""
    upright = draw_shape(canvas(), "circle", "red", (224, 80), 60)
    stored = upright.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    stored.save(buffer, "JPEG", exif=exif, quality=95)
    part = image_part(upright)
    import base64

    encoded = base64.b64encode(buffer.getvalue()).decode()
    part["image_url"]["url"] = f"data:image/jpeg;base64,{encoded}"
    answer = daemon.client().chat.completions.create(
        model="default",
        messages=[
            {"role": "user", "content": [part, {"type": "text", "text": "Where is the circle?"}]}
        ],
        temperature=0,
    )
    assert answer.choices[0].message.content.strip() == "top"


def test_sees_through_to_white(daemon: Daemon) -> None:
    picture = Image.new("RGBA", (448, 448), (0, 0, 0, 0))
    ImageDraw.Draw(picture).ellipse((124, 124, 324, 324), (10, 10, 10, 255))
    assert ask(daemon, picture, "What shape is this?") == "circle"


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_reads_every_format(daemon: Daemon, image_format: str) -> None:
    part = image_part(one_shape("square", "green"), image_format)
    answer = daemon.client().chat.completions.create(
        model="default",
        messages=[
            {
                "role": "user",
                "content": [part, {"type": "text", "text": "What colour is the square?"}],
            }
        ],
        temperature=0,
    )
    assert answer.choices[0].message.content.strip() == "green"


async def test_many_at_once_each_get_their_own_answer(daemon: Daemon) -> None:
    """Twelve pictures at the same time: nobody is answered about somebody else's."""
    shapes = ["circle", "square", "triangle", "star"]
    colors = ["red", "blue", "green"]
    client = daemon.async_client()

    async def one(shape: str, color: str) -> tuple[str, str]:
        answer = await client.chat.completions.create(
            model="default",
            messages=[user(one_shape(shape, color), f"What colour is the {shape}?")],
            temperature=0,
        )
        return color, (answer.choices[0].message.content or "").strip()

    answers = await asyncio.gather(*(one(shape, color) for shape in shapes for color in colors))
    assert [wanted for wanted, _ in answers] == [given for _, given in answers]
