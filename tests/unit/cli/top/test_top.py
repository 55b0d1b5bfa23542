"""`top` shows what a real daemon does, with scripted engines: at a terminal, and to scripts."""

from __future__ import annotations

import copy
import io
import json
from typing import Any

import pytest
from rich.console import Console

from tests.support.daemons import SCRIPTED, Daemon
from tests.support.terminal import session
from vlm_server.cli.main import main
from vlm_server.cli.top.frame import Frame, frame_of
from vlm_server.cli.top.screen import Screen

PERCENTILES = {"count": 3, "p50": 0.08, "p90": 0.12, "p95": 0.2, "p99": 1.5, "max": 75.0}
REQUEST = {
    "id": "chatcmpl-1",
    "route": "/v1/chat/completions",
    "key": "ann",
    "model": "demo",
    "state": "decode",
    "done": 100,
    "total": 600,
    "images": 2,
    "videos": 0,
    "pages": 1,
    "seconds": 2.5,
    "first_token_seconds": 0.2,
}
ENDED = {
    "key": None,
    "model": "demo",
    "ended_at": 990.0,
    "status": 200,
    "finish": "stop",
    "error": None,
    "prompt_tokens": 1234,
    "cached_tokens": 0,
    "tokens": 56,
    "first_token_seconds": 0.25,
    "seconds": 1.5,
}


def status(at: float, written: int, *requests: dict[str, Any], pid: int = 7) -> dict[str, Any]:
    model = {"name": "demo", "base": None, "state": "ready", "progress": None}
    latencies = {"time_to_first_token_seconds": {"percentiles": PERCENTILES}}
    stats = {"generated_tokens": written, "prompt_tokens": 1000, "cached_tokens": 250}
    return {
        "model": "demo",
        "models": [{**model, "memory_bytes": 9 * 10**9, "limit_bytes": 10**10, "memory": None}],
        "time": at,
        "requests": {
            "in_flight": len(requests),
            "limit": 64,
            "list": list(requests),
            "ended": [ENDED, {**ENDED, "error": "engine_died", "status": 503}],
        },
        "latencies": latencies,
        "engine": {"pid": pid, "stats": stats},
    }


def frame(*statuses: dict[str, Any]) -> Frame:
    return frame_of("http://it:1/v1", [{"demo": one} for one in statuses])


def drawn(shown: Frame, columns: int = 110, rows: int | None = None) -> str:
    console = Console(file=io.StringIO(), width=columns, color_system=None)
    console.print(Screen().draw(shown, columns, rows))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_rates_are_since_first_reading() -> None:
    before = status(1000.0, 400, {**REQUEST, "done": 60})
    now = status(1002.0, 500, REQUEST, {**REQUEST, "id": "other", "state": "waiting"})
    told = frame(before, status(1001.0, 400, {**REQUEST, "done": 60}), now)
    assert (told.tokens_per_second, told.read_per_second) == (50.0, 0.0)
    assert [one.tokens_per_second for one in told.live] == [20.0, None]
    assert (told.in_flight, told.waiting) == (2, 1)
    assert told.models[0].cached_share == 0.25


def test_rates_are_unknown_at_first_and_after_restart() -> None:
    now = status(1002.0, 10, REQUEST, pid=8)
    assert frame(now).tokens_per_second is None
    assert frame(status(1000.0, 400), now).tokens_per_second is None


def test_frame_of_older_daemon_has_no_ended_requests() -> None:
    now = copy.deepcopy(status(1000.0, 1))
    del now["requests"]["ended"]
    now["latencies"] = {"time_to_first_token_seconds": {"bounds": [], "counts": []}}
    told = frame(now)
    assert (told.ended, told.models[0].latencies) == ([], {})
    assert "none yet" in drawn(told)


def test_screen_shows_requests_memory_and_times() -> None:
    shown = drawn(frame(status(1000.0, 400, {**REQUEST, "done": 60}), status(1002.0, 500, REQUEST)))
    for text in (
        "1 of 64 requests, 0 waiting   50 tokens/s written",
        "8.38 GiB of 9.31 GiB",
        "answering  ann  demo",
        "100 of 600  20/s  2 pictures, 1 page  2.5 s",
        "first token  80 ms  120 ms  1.5 s  1 min 15 s   3",
        "12 s ago  -    demo   1,234       56       250 ms  1.5 s  stop",
        "engine_died",
    ):
        assert text in shown


def test_memory_bar_has_part_for_each_use() -> None:
    gb = 10**9
    parts = {"weights_bytes": 5 * gb, "kv_bytes": 2 * gb, "caches_bytes": gb, "pool_bytes": 0}
    now = status(1000.0, 1)
    now["models"][0] |= {"memory_bytes": 8 * gb, "limit_bytes": 12 * gb, "memory": parts}
    console = Console(file=io.StringIO(), width=110, force_terminal=True, color_system="standard")
    console.print(Screen().draw(frame(now), 110, 30))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    for colour, columns in ((34, 5), (32, 2), (36, 1)):
        assert f"\x1b[{colour}m" + "\u2588" * columns + "\x1b[0m" in shown
    assert "\u2591" * 4 + "\x1b[0m" in shown


@pytest.mark.parametrize("rows", [14, 24, 50])
def test_screen_fits_terminal(rows: int) -> None:
    """What does not fit is said."""
    requests = [{**REQUEST, "id": f"{number}"} for number in range(40)]
    shown = drawn(frame(status(1000.0, 1, *requests)), 80, rows)
    assert len(shown.splitlines()) <= rows
    assert max(map(len, shown.splitlines())) <= 80
    assert "more" in shown
    assert "ENDED" in shown
    assert "q leaves" in shown


@pytest.mark.parametrize("columns", [40, 60, 72, 80, 120])
def test_narrow_screen_leaves_out_least_important_columns(columns: int) -> None:
    long = {"model": "mlx-community/Qwen3-VL-4B-Instruct-4bit", "key": "a-long-name-of-a-key"}
    waiting = {**REQUEST, "id": "other", "state": "waiting_for_memory"}
    now = status(1002.0, 500, {**REQUEST, **long, "total": 123_456}, waiting)
    now["models"] += [
        {**now["models"][0], "name": long["model"], "progress": {"stage": "s" * 99, "fraction": 1}}
    ]
    now["requests"]["ended"] = [{**ENDED, **long, "error": "context_length_exceeded"}]
    lines = drawn(frame(status(1000.0, 400, {**REQUEST, "done": 60}), now), columns, 40).split("\n")
    assert max(map(len, lines)) <= columns
    shown = {
        line.split()[0]: line for line in lines if line.startswith(("MODEL", "NOW", "TIMES", "END"))
    }
    assert "…" not in "".join(shown.values()), "heads are whole"
    for line, head, least in (
        ("MODEL", "MEMORY", 60),
        ("MODEL", "REQUESTS", 72),
        ("NOW", "TOKENS", 40),
        ("NOW", "MODEL", 60),
        ("NOW", "WITH", 80),
        ("ENDED", "WHOLE", 40),
        ("ENDED", "READ", 80),
    ):
        assert (head in shown[line]) == (columns >= least), (line, head)
    assert ("q leaves", "█ weights" in lines[-2]) == (lines[-2][:8], columns >= 100)


def test_models_of_same_name_keep_their_organizations() -> None:
    now = status(1000.0, 1, {**REQUEST, "model": "b/vl"})
    now["models"] = [{**now["models"][0], "name": name} for name in ("a/vl", "b/vl", "c/other")]
    shown = drawn(frame(now))
    rows = [line.split()[0] for line in shown.splitlines() if " ready " in line]
    assert rows == ["a/vl", "b/vl", "other"]
    assert "ann  b/vl" in shown


def test_hostile_names_cannot_control_terminal() -> None:
    hostile = {**REQUEST, "key": "[red]\x1b]0;x\x07", "model": "m\x9b1m"}
    shown = drawn(frame(status(1000.0, 1, hostile)))
    assert "[red]" in shown
    assert not {"\x1b", "\x07", "\x9b"} & set(shown)


def test_top_prints_object_once(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--json", "--url", daemon.url]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["models"][0]["name"] == "demo"
    assert told["models"][0]["memory_bytes"] > 0
    assert told["tokens_per_second"] is not None
    assert main(["top", "--url", daemon.url]) == 0
    assert "MODEL" in capsys.readouterr().out


def test_top_watches_at_terminal_until_q() -> None:
    with session("serve", "--port", "0", program=SCRIPTED) as serve:
        serve.wait_for("Ctrl-C stops the daemon.")
        url = next(line for line in serve.plain.split() if line.startswith("http://127"))
        with session("top", "--interval", "0.2", "--url", url.rstrip("/")) as top:
            top.wait_until_seen("nothing is asked")
            top.wait_until_seen("MODEL")
            top.type("p")
            top.wait_until_seen("paused")
            top.type("p")
            top.wait_until_gone("paused")
            serve.type("\x03")
            assert serve.ended() == 0
            top.wait_until_seen("no daemon answers")
            top.type("q")
            assert top.ended() == 0
            assert "Traceback" not in top.shown
    assert top.shown.count("\x1b[?1049h") == top.shown.count("\x1b[?1049l") == 1
    assert top.shown.count("\x1b[?25l") == top.shown.count("\x1b[?25h")


@pytest.mark.parametrize("interval", ["0", "x", "1e9"])
def test_top_refuses_odd_interval(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["top", "--interval", interval])
    assert "seconds" in capsys.readouterr().err


def test_top_names_daemon_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--url", "http://127.0.0.1:9"]) == 1
    assert "http://127.0.0.1:9" in capsys.readouterr().err
