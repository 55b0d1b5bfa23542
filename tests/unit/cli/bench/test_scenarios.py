"""Each bench scenario sends its described requests, and computes its figures from the answers."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tests.support.whole_run import few_of
from tests.unit.cli.scripted_server import ScriptedServer, echo, ending, listening, text
from vlm_server.cli.bench.figures import Unit
from vlm_server.cli.bench.report import BenchPlan, BenchRun
from vlm_server.cli.bench.run import measure
from vlm_server.cli.bench.scenarios import SCENARIOS
from vlm_server.cli.bench.servers import BenchTarget, Client

SIZE = (40, 20)


async def run(app: ScriptedServer, *scenarios: str, rounds: int = 1) -> list[BenchRun]:
    plan = BenchPlan(scenarios, rounds, SIZE, seed=1, day_seconds=0.01)
    async with listening(app) as url, Client(BenchTarget("it", url, "m"), 20.0) as client:
        return [run async for run in measure([client], plan)]


def images(request: dict[str, Any]) -> list[str]:
    parts = [part for message in request["messages"] for part in message["content"]]
    return [part["image_url"]["url"] for part in parts if "image_url" in part]


EXPECTED = {  # requests, different images, most images in one request, tokens
    "repeat": (24, 1, 1, {16}),
    "question": (8, 1, 1, {16}),
    "agent": (8, 8, 8, {12}),
    "agent-window": (12, 12, 3, {12}),
    "agent-drops": (12, 12, 6, {12}),
    "stall": (7, 6, 1, {300, 4}),
    "conc": (16, 16, 1, {48}),
    "text": (9, 0, 0, {300}),
    "right": (10, 2, 2, {16}),
    "streams": (48, 0, 0, {300}),
    "longagent": (50, 50, 25, {12}),
    "agents4": (32, 32, 8, {24}),
    "small-mac": (20, 0, 0, {32}),
}


LONG = ("streams", "longagent", "agents4", "agent-window", "agent-drops", "small-mac")


@pytest.mark.parametrize("scenario", few_of(SCENARIOS, [n for n in SCENARIOS if n not in LONG]))
async def test_scenario_sends_expected_requests(scenario: str):
    app = ScriptedServer()
    await run(app, scenario)
    scenario_requests = app.requests[2:]  # after warming up
    shown = [images(request) for request in scenario_requests]
    assert EXPECTED[scenario] == (
        len(scenario_requests),
        len({url for urls in shown for url in urls}),
        max(map(len, shown)),
        {request["max_tokens"] for request in scenario_requests},
    )


@pytest.mark.whole
async def test_scenario_figures_are_all_known_without_failures():
    runs = await run(ScriptedServer(), *(name for name in SCENARIOS if name != "stall"))
    figures = [figure for run in runs for figure in run.figures]
    assert all(figure.value is not None for figure in figures)


async def test_agent_scenario_keeps_answers_in_history():
    app = ScriptedServer()
    await run(app, "agent")
    roles = Counter(message["role"] for message in app.requests[-1]["messages"])
    assert roles == {"system": 1, "user": 8, "assistant": 7}
    assert all(message["content"] for message in app.requests[-1]["messages"])


async def shown(scenario: str) -> list[list[str]]:
    """Each request's images in `scenario`, as the number of the turn that introduced them."""
    app = ScriptedServer()
    await run(app, scenario)
    named: dict[str, str] = {}
    return [
        [named.setdefault(url, f"{len(named) + 1}") for url in images(request)]
        for request in app.requests[2:]
    ]


async def test_agent_window_keeps_latest_three_images():
    turns = [" ".join(shown_images) for shown_images in await shown("agent-window")]
    assert turns[:5] == ["1", "1 2", "1 2 3", "2 3 4", "3 4 5"]
    assert turns[-1] == "10 11 12"


async def test_agent_drops_removes_several_images_at_once():
    turns = await shown("agent-drops")
    assert [len(turn) for turn in turns] == [1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 3, 4]
    assert turns[6] == ["5", "6", "7"]


async def test_agent_window_keeps_all_text_of_history():
    app = ScriptedServer()
    await run(app, "agent-window")
    messages = app.requests[-1]["messages"]
    assert [message["role"] for message in messages] == [
        "system",
        *["user", "assistant"] * 11,
        "user",
    ]
    assert messages[1]["content"] == "Step 1: what changed?"
    before = app.requests[-2]["messages"]
    forgotten = next(
        i for i, message in enumerate(before) if not isinstance(message["content"], str)
    )
    assert messages[:forgotten] == before[:forgotten], "what is before the oldest image stays"


async def test_agent_window_reports_tokens_not_cached():
    runs = await run(ScriptedServer(), "agent-window")
    figures = {figure.name: figure for figure in runs[-1].figures}
    assert figures["not cached, mean from turn 5 on"].value == 2.0
    assert figures["TTFT, mean from turn 5 on"].unit is Unit.MILLISECONDS


def counting_words(cached_share: float) -> ScriptedServer:
    """A server for which a word is two tokens, of which it has cached this share."""

    def script(request: dict[str, Any]) -> list[tuple[float, bytes]]:
        messages = request["messages"]
        num_tokens = [2 * len(str(message["content"]).split()) for message in messages]
        cached_tokens = int(cached_share * sum(num_tokens[:-1]))
        return [(0.0, text("a")), (0.0, ending(1, sum(num_tokens), cached_tokens))]

    return ScriptedServer(script)


@pytest.mark.whole
async def test_small_mac_agents_reach_their_length_and_report_lost_tokens():
    figures = (await run(counting_words(1.0), "small-mac"))[-1].figures
    by_name = {figure.name: figure.value for figure in figures}
    length = by_name["prompt, last turn"]
    assert length == pytest.approx(23_000, rel=0.01)
    assert by_name["prefilled again, sum"] == 0
    assert by_name["nothing is prefilled again"] == 1.0
    figures = (await run(counting_words(0.9), "small-mac"))[-1].figures
    by_name = {figure.name: figure.value for figure in figures}
    assert by_name["nothing is prefilled again"] == 0.0
    assert by_name["prefilled again, sum"] == pytest.approx(0.1 * 2 * 9 * 11_500, rel=0.2)


@pytest.mark.alone
async def test_stall_scenario_measures_longest_gap_of_stream():
    def script(request: dict[str, Any]) -> list[tuple[float, bytes]]:
        if images(request):
            return [(0.05, text("p")), (0.0, ending(4))]
        return [(0.0, text("a")), (0.45, text("b")), (0.25, text("c")), (0.0, ending(300))]

    runs = await run(ScriptedServer(script), "stall")
    silence, ttft = runs[-1].figures
    assert silence.value == pytest.approx(450, abs=60)
    assert ttft.value == pytest.approx(50, abs=40)


async def test_stall_scenario_is_unknown_if_text_ends_before_images():
    runs = await run(ScriptedServer(), "stall")
    assert runs[-1].figures[0].value is None


async def test_conc_scenario_counts_clears_among_governor_decisions():
    """Only clears count among a governor's decisions, and only those during the scenario."""

    def script(request: dict[str, Any]) -> list[tuple[float, bytes]]:
        for kind in ("clear_decode", "evict"):
            app.decisions[kind] = app.decisions.get(kind, 0) + 1
        return echo(request)

    app = ScriptedServer(script, decisions={"clear_idle": 3})
    figures = {figure.name: figure.value for figure in (await run(app, "conc"))[-1].figures}
    assert figures["clears of freed memory"] == 16


@pytest.mark.alone
async def test_conc_scenario_reports_gap_median_p99_and_ratio():
    def script(_: dict[str, Any]) -> list[tuple[float, bytes]]:
        pieces = [(0.02, text(str(number))) for number in range(10)]
        return [*pieces, (0.4, text("at last")), (0.0, ending(11))]

    runs = await run(ScriptedServer(script), "conc")
    figures = {figure.name: figure.value for figure in runs[-1].figures}
    middle, most = figures["between tokens, median"], figures["between tokens, p99"]
    assert middle is not None
    assert most is not None
    assert 15 <= middle <= 100
    assert most >= 390
    assert figures["between tokens, p99 / median"] == pytest.approx(most / middle)


async def test_conc_scenario_clears_are_unknown_without_status_route():
    class WithoutStatusRoute(ScriptedServer):
        """A server without the route `/v1/status`."""

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "/v1/status":
                await self._answer(send, [(0.0, b"no such route")], 404)
            else:
                await super().__call__(scope, receive, send)

    runs = await run(WithoutStatusRoute(), "conc")
    assert [figure.value is None for figure in runs[-1].figures] == [*5 * [False], True]


async def test_right_scenario_detects_answers_that_differ():
    def numbered_answers(request: dict[str, Any]) -> list[tuple[float, bytes]]:
        app.num_answers += 1
        return [(0.0, text(str(app.num_answers))), (0.0, ending(1))]

    class CountingServer(ScriptedServer):
        num_answers = 0

    good = (await run(ScriptedServer(echo), "right"))[-1].figures
    assert [figure.value for figure in good] == [1.0, 0.0, 0.0]
    assert {figure.unit for figure in good} == {Unit.EQUAL}
    app = CountingServer(numbered_answers)
    assert (await run(app, "right"))[-1].figures[0].value == 0.0


async def test_scenario_failures_are_kept_and_figures_unknown():
    app = ScriptedServer(lambda _: [(0.0, b"no")], status=500)
    runs = await run(app, *SCENARIOS)
    assert all(answer.error == "HTTP 500: no" for run in runs for answer in run.answers)
    assert all(figure.value is None for run in runs for figure in run.figures)


async def test_scenario_rounds_share_no_messages():
    app = ScriptedServer()
    await run(app, "conc", "text", rounds=2)
    messages = [json.dumps(request["messages"]) for request in app.requests]
    assert len(set(messages)) == len(messages)


async def test_servers_alternate_and_get_identical_requests():
    one, two = ScriptedServer(), ScriptedServer()
    async with (
        listening(one) as first,
        listening(two) as second,
        Client(BenchTarget("one", first, "m"), 20.0) as a,
        Client(BenchTarget("two", second, "m"), 20.0) as b,
    ):
        plan = BenchPlan(("question",), 2, SIZE, seed=1, day_seconds=1.0)
        order = [f"{run.round}{run.server}" async for run in measure([a, b], plan)]
    assert order == ["0one", "0two", "1one", "1two", "2two", "2one"]
    assert one.requests == two.requests
