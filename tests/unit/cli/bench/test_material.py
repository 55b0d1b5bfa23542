"""Bench images and texts are the same for every server, and new in every round."""

from __future__ import annotations

import base64
import io
import random

import pytest
from PIL import Image

from vlm_server.cli.bench.material import BLOCK_PIXELS, Material, parse_size, random_png, user
from vlm_server.errors import ConfigError

SIZE = (110, 45)


def test_random_image_is_made_of_uniform_blocks():
    image = Image.open(io.BytesIO(random_png(SIZE, random.Random(1))))
    assert (image.format, image.mode, image.size) == ("PNG", "RGB", SIZE)
    for x, y in ((0, 0), (BLOCK_PIXELS, BLOCK_PIXELS)):
        block = image.crop((x, y, x + BLOCK_PIXELS, y + BLOCK_PIXELS))
        assert len(block.getcolors() or []) == 1
    assert len(image.getcolors() or []) == 6 * 3


def test_material_of_same_round_is_identical():
    one, two = (Material(SIZE, 7, "repeat", 1) for _ in range(2))
    for _ in range(3):
        assert one.image() == two.image()
        assert one.story() == two.story()
        assert one.system() == two.system()


def test_material_never_repeats_across_scenarios_rounds_and_seeds():
    materials = [
        Material(SIZE, seed, scenario, round_)
        for seed in (1, 2)
        for scenario in ("repeat", "agent")
        for round_ in (0, 1, 2)
    ]
    images = [material.image() for material in materials for _ in range(3)]
    systems = [material.system()["content"] for material in materials]
    assert len(set(images)) == len(images)
    assert len(set(systems)) == len(systems)


def test_system_prompt_has_twenty_sentences():
    assert Material(SIZE, 1, "agent", 1).system()["content"].count(".") == 20


def test_bench_message_has_images_before_text():
    url = Material(SIZE, 1, "agent", 1).image()
    first, second = user("What?", url)["content"]
    data = first["image_url"]["url"].removeprefix("data:image/png;base64,")
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == SIZE
    assert second == {"type": "text", "text": "What?"}
    assert user("What?")["content"] == "What?"


@pytest.mark.parametrize(("text", "size"), [("560x420", (560, 420)), (" 1092X812", (1092, 812))])
def test_image_size_is_parsed(text: str, size: tuple[int, int]):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "560", "560x", "-5x20", "19x420", "560x99999", "5.0x420"])
def test_invalid_image_size_is_refused(text: str):
    with pytest.raises(ConfigError, match="WIDTHxHEIGHT"):
        parse_size(text)
