"""The agent of docs/agents.md clicks on its target, whatever the size of the screenshot."""

from __future__ import annotations

from math import dist

import pytest

from tests.docs.pages import ROOT, Page
from tests.docs.running import PageRun
from tests.docs.sandbox import Sandbox
from tests.support.images import canvas, draw_shape


@pytest.mark.parametrize(
    ("size", "middle", "radius"),
    [((1280, 720), (900, 200), 110), ((800, 1280), (600, 300), 100)],
    ids=["wide", "tall"],
)
def test_documented_agent_clicks_within_target(
    sandbox: Sandbox, size: tuple[int, int], middle: tuple[int, int], radius: int
) -> None:
    screen = draw_shape(canvas(size), "circle", "red", middle, radius)
    draw_shape(screen, "star", "blue", (300, 500), 120).save(sandbox.folder / "screenshot.png")
    page = Page(ROOT / "docs/agents.md")
    (loop,) = [block for block in page.blocks if "def to_screen" in block.text]
    run = PageRun(sandbox)
    run.run(loop)
    assert dist((run.names["x"], run.names["y"]), middle) < radius
