"""The embedded model answers truly about images, in a real daemon."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import ollama
import pytest
from PIL import Image, ImageDraw

from tests.e2e.test_json_answers import SCHEMA, STRICT
from tests.e2e.test_tokenize import post
from tests.support.daemons import Daemon, running_daemon, with_settings
from tests.support.images import canvas, draw_shape, encoded, image_part, one_shape, user, word
from tests.support.whole_run import few_of

pytestmark = pytest.mark.e2e

SHAPES = ("circle", "square", "triangle", "star")
SIZES = ((448, 448), (640, 360), (200, 260))


def ask(daemon: Daemon, *content: Any, history: tuple[dict[str, Any], ...] = ()) -> str:
    answer = daemon.client().chat.completions.create(
        model="default", messages=[*history, user(*content)], temperature=0, max_tokens=60
    )
    return answer.choices[0].message.content.strip()


@pytest.mark.parametrize(
    ("shape", "size"),
    few_of(
        product(SHAPES, SIZES),
        (("circle", SIZES[0]), ("square", SIZES[1]), ("triangle", SIZES[2]), ("star", SIZES[0])),
    ),
)
def test_model_names_shape(daemon: Daemon, shape: str, size: tuple[int, int]) -> None:
    image = one_shape(shape, "blue", size, background=(240, 240, 225))
    assert ask(daemon, image, "What shape is this?") == shape


@pytest.mark.parametrize(
    "color",
    few_of(
        ("red", "green", "blue", "yellow", "orange", "purple", "black", "white"), ("red", "white")
    ),
)
def test_model_names_colour(daemon: Daemon, color: str) -> None:
    background = (90, 100, 110) if color in ("white", "black") else "white"
    image = one_shape("circle", color, background=background)
    assert ask(daemon, image, "What colour is the circle?") == color


@pytest.mark.parametrize("count", few_of((1, 2, 3, 4), (1, 4)))
def test_model_counts_squares(daemon: Daemon, count: int) -> None:
    image = canvas()
    for center in [(110, 120), (330, 110), (120, 330), (335, 340)][:count]:
        draw_shape(image, "square", "green", center, 55)
    assert ask(daemon, image, "How many squares are there?") == str(count)


@pytest.mark.parametrize(
    ("place", "center"),
    few_of(
        (
            ("left", (80, 224)),
            ("right", (368, 224)),
            ("top", (224, 80)),
            ("bottom", (224, 368)),
            ("middle", (224, 224)),
        ),
        (("left", (80, 224)), ("top", (224, 80))),
    ),
)
def test_model_says_where_star_is(daemon: Daemon, place: str, center: tuple[int, int]) -> None:
    image = draw_shape(canvas(), "star", "red", center, 60)
    assert ask(daemon, image, "Where is the star?") == place


@pytest.mark.parametrize(("color", "answer"), [("red", "yes"), ("green", "no")])
def test_model_answers_yes_or_no(daemon: Daemon, color: str, answer: str) -> None:
    image = one_shape("triangle", "red")
    assert ask(daemon, image, f"Is there a {color} triangle?") == answer


@pytest.mark.parametrize("text", few_of(("HELLO", "river", "4711", "Invoice"), ("4711", "Invoice")))
def test_model_reads_word(daemon: Daemon, text: str) -> None:
    assert ask(daemon, word(text), "What does the text say?") == text


def test_greedy_choices_give_equal_true_answers(daemon: Daemon) -> None:
    answer = daemon.client().chat.completions.create(
        model="default",
        messages=[user(one_shape("circle", "red"), "What colour is the shape?")],
        temperature=0,
        n=2,
    )
    texts = [choice.message.content or "" for choice in answer.choices]
    assert [("red" in text.lower()) for text in texts] == [True, True]
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


def test_model_answers_in_json(daemon: Daemon) -> None:
    answer = daemon.client().chat.completions.create(
        model="default",
        messages=[user("Hello")],
        temperature=0,
        max_tokens=200,
        response_format=STRICT,  # type: ignore[arg-type]
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)


def test_model_answers_ollamas_client(daemon: Daemon) -> None:
    client = ollama.Client(daemon.url)
    name = client.list().models[0].model
    assert name is not None
    assert "vision" in (client.show(name).capabilities or [])
    assert [model.model for model in client.ps().models] == [name]
    message = {
        "role": "user",
        "content": "What shape is this?",
        "images": [encoded(one_shape("star", "red"))],
    }
    answer = client.chat(name, [message], options={"temperature": 0, "num_predict": 24})
    assert "star" in (answer.message.content or "").lower()
    assert answer.done_reason == "stop"


def test_tokenized_prompt_is_detokenized_to_itself(daemon: Daemon) -> None:
    counted = post(daemon, "/v1/tokenize", prompt="How many red circles?")
    assert counted["count"] == len(counted["tokens"]) > 0
    read = post(daemon, "/v1/detokenize", tokens=counted["tokens"])
    assert read == {"prompt": "How many red circles?"}


def test_embedded_model_refuses_prompts_longer_than_its_usable_context(tmp_path: Path) -> None:
    with running_daemon(tmp_path, *with_settings("model.max_context_tokens=auto")) as running:
        model = httpx.get(f"{running.url}/v1/models").json()["data"][0]
        assert model["max_model_len"] == 6144
        messages = [{"role": "user", "content": "How many? " * 1500}]
        body = {"model": "demo", "messages": messages}
        refused = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "6144" in error["message"]


def test_model_list_shows_family_length_and_vision(daemon: Daemon) -> None:
    model = httpx.get(f"{daemon.url}/v1/models").json()["data"][0]
    assert (model["family"], model["max_model_len"]) == ("qwen3_vl", 8192)
    assert "vision" in model["capabilities"]
    assert model["num_parameters"] > 1_000_000
    (shown,) = httpx.get(f"{daemon.url}/api/v0/models").json()["data"]
    assert (shown["type"], shown["state"], shown["max_context_length"]) == ("vlm", "loaded", 8192)
    assert httpx.get(f"{daemon.url}/health").status_code == 200


def test_model_describes_image(daemon: Daemon) -> None:
    description = ask(daemon, one_shape("star", "purple"), "Describe the picture.").lower()
    assert "purple star" in description


@pytest.mark.parametrize(("circle_first", "answer"), [(True, "first"), (False, "second")])
def test_model_distinguishes_two_images(daemon: Daemon, circle_first: bool, answer: str) -> None:
    circle, square = one_shape("circle", "red"), one_shape("square", "blue", (320, 240))
    pair = (circle, square) if circle_first else (square, circle)
    assert answer in ask(daemon, *pair, "Which picture has a circle?").lower()


def test_model_follows_conversation(daemon: Daemon) -> None:
    image = draw_shape(canvas(), "triangle", "orange", (80, 224), 60)
    history = (
        user(image, "What shape is this?"),
        {"role": "assistant", "content": "triangle"},
    )
    assert ask(daemon, "What colour is it?", history=history) == "orange"
    assert ask(daemon, "Where is it?", history=history) == "left"


def test_model_sees_rotated_photos_upright(daemon: Daemon) -> None:
    """EXIF orientation 6: stored lying on its side, to be shown turned clockwise."""
    upright = draw_shape(canvas(), "circle", "red", (224, 80), 60)
    stored = upright.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    stored.save(buffer, "JPEG", exif=exif, quality=95)
    part = image_part(upright)
    data = base64.b64encode(buffer.getvalue()).decode()
    part["image_url"]["url"] = f"data:image/jpeg;base64,{data}"
    answer = daemon.client().chat.completions.create(
        model="default",
        messages=[
            {"role": "user", "content": [part, {"type": "text", "text": "Where is the circle?"}]}
        ],
        temperature=0,
    )
    assert answer.choices[0].message.content.strip() == "top"


def test_transparent_images_are_seen_on_white(daemon: Daemon) -> None:
    image = Image.new("RGBA", (448, 448), (0, 0, 0, 0))
    ImageDraw.Draw(image).ellipse((124, 124, 324, 324), (10, 10, 10, 255))
    assert ask(daemon, image, "What shape is this?") == "circle"


@pytest.mark.parametrize("image_format", few_of(("PNG", "JPEG", "WEBP", "GIF"), ("WEBP", "GIF")))
def test_model_sees_images_of_every_format(daemon: Daemon, image_format: str) -> None:
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


async def test_concurrent_images_get_their_own_answers(daemon: Daemon) -> None:
    """Twelve images at the same time."""
    shapes = ["circle", "square", "triangle", "star"]
    colors = ["red", "blue", "green"]
    client = daemon.async_client()

    async def answer_about(shape: str, color: str) -> tuple[str, str]:
        answer = await client.chat.completions.create(
            model="default",
            messages=[user(one_shape(shape, color), f"What colour is the {shape}?")],
            temperature=0,
        )
        return color, (answer.choices[0].message.content or "").strip()

    answers = await asyncio.gather(
        *(answer_about(shape, color) for shape in shapes for color in colors)
    )
    assert [wanted for wanted, _ in answers] == [given for _, given in answers]
