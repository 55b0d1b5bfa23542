"""The plot of a day is SVG with every request and every tenth."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from vlm_server.cli.bench import plot
from vlm_server.cli.bench.day import FIXED_WORK, DaySample
from vlm_server.cli.bench.plot import Axis
from vlm_server.cli.bench.report import BenchRun

SVG = "{http://www.w3.org/2000/svg}"


def day_run(server: str = "a<b") -> BenchRun:
    kinds = {"agent, turn 1": 0.5, "agent, turn 2": 0.7, "text": 0.03}
    samples = [
        DaySample(kind, n, 10.0 * n, None if (n, kind) == (4, "text") else ttft)
        for n in range(20)
        for kind, ttft in kinds.items()
    ]
    return BenchRun("day", 1, server, 200.0, [], [], samples)


def drawn(*runs: BenchRun) -> ElementTree.Element:
    return ElementTree.fromstring(plot.svg(runs))


def test_plot_has_dot_per_request_in_both_panels():
    root = drawn(day_run())
    dots = [dot for dot in root.iter(f"{SVG}circle") if dot.get("r") == "1.8"]
    assert len(dots) == 2 * (3 * 20 - 1), "one failed"
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    assert all(0 < float(dot.get("cx", 0)) < width for dot in dots)
    assert all(0 < float(dot.get("cy", 0)) < height for dot in dots)


def test_plot_shows_tenths_and_kinds():
    root = drawn(day_run())
    thick = [path for path in root.iter(f"{SVG}path") if path.get("stroke-width")]
    assert len(thick) == 10
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "a<b, round 1: 60 requests" in texts
    assert texts.count("agent") == texts.count("text") == 1, "turns of an agent share a colour"


def test_plot_shows_fixed_work_as_second_line():
    run = day_run()
    work = [DaySample(FIXED_WORK, n, 10.0 * n, 0.01) for n in range(20)]
    root = drawn(BenchRun("day", 1, "a<b", 200.0, [], [], [*run.samples, *work]))
    thick = [path for path in root.iter(f"{SVG}path") if path.get("stroke-width")]
    assert len(thick) == 20
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "a<b, round 1: 60 requests" in texts, "it is no request"
    assert FIXED_WORK not in texts


def test_plot_stacks_days_vertically():
    one, two = drawn(day_run()), drawn(day_run(), day_run("other"))
    assert float(two.get("height", 0)) == 2 * float(one.get("height", 0))


def test_plot_without_samples_has_no_dots():
    assert not list(drawn(BenchRun("repeat", 1, "a", 1.0, [], [])).iter(f"{SVG}circle"))
    silent = BenchRun("day", 1, "a", 1.0, [], [], [DaySample("text", 0, 0.0, None)])
    assert not [dot for dot in drawn(silent).iter(f"{SVG}circle") if dot.get("r") == "1.8"]


@pytest.mark.parametrize(
    ("axis", "ticks"),
    [
        (Axis(0.0, 8.2, 0, 1), [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (Axis(0.8, 1.2, 0, 1), [0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2]),
        (Axis(15.0, 2600.0, 0, 1, is_logarithmic=True), [20, 50, 100, 200, 500, 1000, 2000]),
    ],
)
def test_axis_ticks_are_round_numbers(axis: Axis, ticks: list[float]):
    assert axis.ticks() == pytest.approx(ticks)


def test_axis_maps_values_to_pixels():
    assert Axis(0.0, 10.0, 100, 50).pixel(2.5) == 87.5
    assert Axis(1.0, 100.0, 0, 40, is_logarithmic=True).pixel(10.0) == 20.0
