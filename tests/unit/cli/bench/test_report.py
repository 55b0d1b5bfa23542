"""The bench table and document show every figure and every failure."""

from __future__ import annotations

import json

import pytest

from vlm_server.cli.bench import command, report, words
from vlm_server.cli.bench.figures import Figure, Unit
from vlm_server.cli.bench.report import BenchPlan, BenchRun
from vlm_server.cli.bench.servers import BenchTarget
from vlm_server.cli.client.answer import TimedAnswer, failed_answer

TARGETS = [BenchTarget("ours", "http://a/v1", "m"), BenchTarget("peer", "http://b/v1", "m")]
PLAN = BenchPlan(("repeat", "right"), 3, (560, 420), seed=5, day_seconds=1.0)
GOOD = TimedAnswer(text="a", arrivals=(0.1,), completion_tokens=1)
BUSY = failed_answer("busy", 0.0)


def ms(value: float | None) -> Figure:
    return Figure("TTFT, first", value, Unit.MILLISECONDS)


def same(value: float | None) -> Figure:
    return Figure("at once and alone (should be equal)", value, Unit.EQUAL)


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
        "Medians of 3 rounds, [lowest - highest].",
        "\u2193: lower is better, \u2191: higher is better.",
        "Pictures: 560x420.",
        "Seed: 5; --seed repeats it, from caches, too.",
        "",
        "                                                   ours                peer"
        "             / ours",
        "",
        "repeat: one picture and one question, 24 times",
        "  Good: a small part of the first time, and no slow ones. Bad: as slow as the first time.",
        "    wait for the first word, the first time  \u2193 ms  20.0 [10.0 - 30.0]  "
        "150 [100 - 200]  7.50 worse",
        "",
        "right: questions at once, compared with the same ones alone",
        "  Good: yes everywhere. A no: requests change each other's answers, or mix up pictures.",
        "    answers at once are those alone                yes                 yes in 1 of 3    -",
        "",
        "ours: 6 requests, 0 failed",
        "peer: 9 requests, 2 failed, 1 answers without usage",
        "  2x busy",
    ]


def row(bench_runs: list[BenchRun], begin: str) -> str:
    """The table's row that begins so, without its beginning."""
    lines = report.comparison(TARGETS, PLAN, bench_runs).splitlines()
    return next(
        line.strip().removeprefix(begin) for line in lines if line.strip().startswith(begin)
    )


def test_comparison_table_folds_names_where_terminal_is_narrow():
    one_server = [run for run in runs() if run.server == "ours"]
    wide = report.comparison(TARGETS[:1], PLAN, one_server)
    narrow = report.comparison(TARGETS[:1], PLAN, one_server, 60)
    assert max(map(len, narrow.splitlines())) <= 60
    assert sorted(narrow.split()) == sorted(wide.split())
    assert "20.0 [10.0 - 30.0]" in narrow


def test_comparison_table_shows_dash_for_unknown_figure():
    nothing = [BenchRun("repeat", 1, "ours", 1.0, [ms(4.0)], [GOOD])]
    nothing.append(BenchRun("repeat", 1, "peer", 1.0, [ms(None)], [failed_answer("no", 0.0)]))
    assert row(nothing, "wait for the first word, the first time").split() == [
        "\u2193",
        "ms",
        "4.00",
        "-",
        "-",
    ]


@pytest.mark.parametrize(
    ("ours", "peer", "unit", "verdict"),
    [
        ((10.0, 12.0), (20.0, 24.0), Unit.MILLISECONDS, "2.00 worse"),
        ((20.0, 24.0), (10.0, 12.0), Unit.MILLISECONDS, "0.50 better"),
        ((20.0, 24.0), (10.0, 12.0), Unit.TOKENS_PER_SECOND, "0.50 worse"),
        ((10.0, 12.0), (20.0, 24.0), Unit.TOKENS_PER_SECOND, "2.00 better"),
        ((10.0, 12.0), (11.0, 11.0), Unit.MILLISECONDS, "1.00 even"),
        ((10.0,), (20.0,), Unit.MILLISECONDS, "2.00"),
    ],
)
def test_comparison_says_better_only_beyond_spread(
    ours: tuple[float, ...], peer: tuple[float, ...], unit: Unit, verdict: str
):
    bench_runs = [
        BenchRun("text", number, name, 1.0, [Figure("f", value, unit)], [GOOD])
        for name, values in (("ours", ours), ("peer", peer))
        for number, value in enumerate(values, 1)
    ]
    assert row(bench_runs, "f ").endswith(f"  {verdict}")


def test_comparison_table_shows_met_bars_and_undivided_drift():
    bench_runs = [
        BenchRun(
            "day", 1, name, 1.0, [Figure("d", value, Unit.PERCENT), Figure("b", met, Unit.MET)], []
        )
        for name, value, met in (("ours", -0.5, 1.0), ("peer", 12.0, 0.0))
    ]
    assert row(bench_runs, "d ").split() == ["%", "-0.50", "12.0", "-"]
    assert row(bench_runs, "b ").split() == ["yes", "no", "-"]


def test_comparison_table_leaves_turns_between_to_document():
    figures = [Figure(f"TTFT, turn {turn}", 1.0, Unit.MILLISECONDS) for turn in range(1, 13)]
    bench_runs = [BenchRun("agent-window", 1, "ours", 1.0, figures, [GOOD])]
    shown = report.comparison(TARGETS, PLAN, bench_runs)
    assert "turn 1 " in shown
    assert "turn 2" not in shown
    document = json.loads(report.document(TARGETS, PLAN, bench_runs))
    assert len(document["figures"]) == 12


def test_every_scenario_has_words():
    assert set(words.SCENARIOS) == set(command.SCENARIOS)
    assert all(one.title and one.good.startswith(("Good: ",)) for one in words.SCENARIOS.values())


async def test_every_figure_has_plain_name():
    """No abbreviation reaches the table."""
    for name in ("TTFT, turn 8", "16 streams", "TTFT, second, turn 25", "burst: TTFT"):
        assert "TTFT" not in words.plain_name(name)
    for name in ("between tokens, p99", "all users", "A+B and B+A (should differ)"):
        assert words.plain_name(name) != name


def test_bench_document_holds_plan_figures_and_runs():
    document = json.loads(report.document(TARGETS, PLAN, runs()))
    assert document["plan"]["image_size"] == [560, 420]
    assert document["servers"]["peer"] == {"url": "http://b/v1", "model": "m"}
    assert document["figures"][0] == {
        "scenario": "repeat",
        "name": "TTFT, first",
        "means": "wait for the first word, the first time",
        "unit": "ms",
        "rounds": {"ours": [10.0, 30.0, 20.0], "peer": [100.0, None, 200.0]},
    }
    assert len(document["runs"]) == 13
    assert document["runs"][0]["answers"][0]["arrivals"] == [0.1]


def test_progress_line_reports_time_and_failures():
    first, last = runs()[0], runs()[-1]
    title = words.SCENARIOS["repeat"].title
    assert report.progress(first, PLAN) == f"round 1 of 3, repeat ({title}): ours took 1.0 s"
    assert report.run_name("repeat", 2, PLAN) == "round 2 of 3, repeat"
    assert report.progress(last, PLAN) == "warm-up: peer took 1.0 s, 2 of 3 requests failed"
