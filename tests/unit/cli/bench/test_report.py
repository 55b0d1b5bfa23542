"""The bench table and document show every figure and every failure."""

from __future__ import annotations

import json

from vlm_server.cli.bench import report
from vlm_server.cli.bench.figures import Figure, Unit
from vlm_server.cli.bench.report import BenchPlan, BenchRun
from vlm_server.cli.bench.servers import BenchTarget
from vlm_server.cli.client.answer import TimedAnswer, failed_answer

TARGETS = [BenchTarget("ours", "http://a/v1", "m"), BenchTarget("peer", "http://b/v1", "m")]
PLAN = BenchPlan(("repeat", "right"), 3, (560, 420), seed=5, day_seconds=1.0)
GOOD = TimedAnswer(text="a", arrivals=(0.1,), completion_tokens=1)
BUSY = failed_answer("busy", 0.0)


def ms(value: float | None) -> Figure:
    return Figure("TTFT", value, Unit.MILLISECONDS)


def same(value: float | None) -> Figure:
    return Figure("texts", value, Unit.EQUAL)


def runs() -> list[BenchRun]:
    values = {"ours": (10.0, 30.0, 20.0), "peer": (100.0, None, 200.0)}
    equal = {"ours": (1.0, 1.0, 1.0), "peer": (0.0, 1.0, 0.0)}
    bench_runs = []
    for round_ in range(3):
        for name in ("ours", "peer"):
            bench_runs.append(
                BenchRun("repeat", round_ + 1, name, 1.0, [ms(values[name][round_])], [GOOD])
            )
            bench_runs.append(
                BenchRun("right", round_ + 1, name, 1.0, [same(equal[name][round_])], [GOOD])
            )
    bench_runs.append(BenchRun("warm-up", 0, "peer", 1.0, [], [BUSY, BUSY, TimedAnswer()]))
    return bench_runs


def test_comparison_table_has_expected_text():
    assert report.comparison(TARGETS, PLAN, runs()).splitlines() == [
        "median [min - max] of 3 rounds; pictures of 560x420; seed 5",
        "",
        "scenario  figure      ours                peer             / ours",
        "repeat    TTFT    ms  20.0 [10.0 - 30.0]  150 [100 - 200]  7.50",
        "right     texts       equal               equal in 1 of 3  -",
        "",
        "ours: 6 requests, 0 failed",
        "peer: 9 requests, 2 failed, 1 answers without usage",
        "  2x busy",
    ]


def test_comparison_table_shows_dash_for_unknown_figure():
    nothing = [BenchRun("repeat", 1, "ours", 1.0, [ms(4.0)], [GOOD])]
    nothing.append(BenchRun("repeat", 1, "peer", 1.0, [ms(None)], [failed_answer("no", 0.0)]))
    assert "repeat    TTFT    ms  4.00  -     -" in report.comparison(TARGETS, PLAN, nothing)


def test_comparison_table_shows_met_bars_and_undivided_drift():
    bench_runs = [
        BenchRun(
            "day", 1, name, 1.0, [Figure("d", value, Unit.PERCENT), Figure("b", met, Unit.MET)], []
        )
        for name, value, met in (("ours", -0.5, 1.0), ("peer", 12.0, 0.0))
    ]
    rows = report.comparison(TARGETS, PLAN, bench_runs).splitlines()
    assert rows[3:5] == [
        "day       d       %  -0.50  12.0    -",
        "          b          met    missed  -",
    ]


def test_bench_document_holds_plan_figures_and_runs():
    document = json.loads(report.document(TARGETS, PLAN, runs()))
    assert document["plan"]["image_size"] == [560, 420]
    assert document["servers"]["peer"] == {"url": "http://b/v1", "model": "m"}
    assert document["figures"][0] == {
        "scenario": "repeat",
        "name": "TTFT",
        "unit": "ms",
        "rounds": {"ours": [10.0, 30.0, 20.0], "peer": [100.0, None, 200.0]},
    }
    assert len(document["runs"]) == 13
    assert document["runs"][0]["answers"][0]["arrivals"] == [0.1]


def test_progress_line_reports_time_and_failures():
    assert report.progress(runs()[0]) == "round 1 repeat: ours took 1.0 s"
    assert report.progress(runs()[-1]) == "warm-up: peer took 1.0 s, 2 of 3 requests failed"
