"""docs/agents.md: from a point in an answer back to the screenshot, through a real resize."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import asdict, replace
from numpy.typing import NDArray
from PIL import Image as PillowImage

from tests.integration.harness import Load, ask, prepare
from tests.support.image_files import submitted
from vlm_server.prompt.media.image_sizes import fit

pytestmark = pytest.mark.families("tiling")

DOCS = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
SCREEN = (640, 362)
MARK = (501, 97)
"""The middle of a white square on a black screen."""


@pytest.fixture(scope="module")
def to_screen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The function that the document shows."""
    (source,) = re.findall(r"^def to_screen.*?(?=^\S)", DOCS, re.DOTALL | re.MULTILINE)
    path = tmp_path_factory.mktemp("docs") / "agents.py"
    path.write_text(source)
    return runpy.run_path(str(path))["to_screen"]


def screenshot() -> PillowImage.Image:
    pixels = np.zeros((SCREEN[1], SCREEN[0], 3), np.uint8)
    x, y = MARK
    pixels[y - 8 : y + 9, x - 8 : x + 9] = 255
    return PillowImage.fromarray(pixels)


def encoder_input(inputs: Any, patch_size: int, merged: int) -> NDArray[np.float64]:
    """The vision encoder's input, (height, width), assembled from its patches."""
    _, rows, columns = inputs["image_grid_thw"].reshape(3)
    side = patch_size
    blocks = inputs["pixel_bytes"].reshape(
        rows // merged, columns // merged, merged, merged, 3, side, side
    )
    image = blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * side, columns * side, 3)
    return image.mean(axis=-1, dtype=np.float64)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize(
    "wishes",
    [{}, {"max_pixels": 300 * 200}, {"min_pixels": 900 * 600}, {"max_side_pixels": 400}],
    ids=str,
)
@pytest.mark.parametrize("relative", [False, True])
def test_scaled_mark_maps_back_to_its_screen_position(
    load_tiny: Load, to_screen: Any, family: str, wishes: dict[str, int], relative: bool
):
    loaded, preparer = load_tiny(family)
    made = prepare(preparer, ask("a", replace(submitted(screenshot()), **wishes), "Where?"))
    made.references.release()
    (use,) = made.prompt.images
    (inputs,) = made.inputs.values()
    processor = loaded.processor.image_processor
    image = encoder_input(inputs, processor.patch_size, processor.merge_size)
    assert image.shape == (use.height, use.width)
    weights = image / image.sum()
    y, x = (float((weights * (axis + 0.5)).sum()) for axis in np.indices(image.shape))
    answer = (x / use.width * 1000, y / use.height * 1000) if relative else (x, y)
    found = to_screen(*answer, asdict(use), SCREEN, relative)
    assert found == pytest.approx((MARK[0] + 0.5, MARK[1] + 0.5), abs=1.0)


ROWS = re.findall(
    r"\| (\d+) . (\d+) \| (\d+) . (\d+), (\d+) tokens \| (\d+) . (\d+), (\d+) tokens \|", DOCS
)


def test_documented_coordinate_table_has_three_screenshots():
    assert len(ROWS) == 3


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}x{row[1]}")
@pytest.mark.parametrize(("factor", "first"), [(28, 2), (32, 5)])
def test_documented_screenshot_sizes_follow_resize_rule(
    row: tuple[str, ...], factor: int, first: int
):
    width, height, tokens = map(int, row[first : first + 3])
    assert fit((int(row[0]), int(row[1])), factor, 1, 1 << 40) == (width, height)
    assert tokens == width * height // factor**2
