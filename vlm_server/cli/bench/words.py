"""What scenarios and figures mean, for people who see them for the first time."""

from __future__ import annotations

import re
from typing import NamedTuple

from vlm_server.cli.bench.figures import Unit

WAIT = "wait for the first word"


class ScenarioWords(NamedTuple):
    """A scenario: what its clients do, and what good and bad servers make of it."""

    title: str
    good: str


SCENARIOS = {
    "repeat": ScenarioWords(
        "one picture and one question, 24 times",
        "Good: a small part of the first time, and no slow ones. Bad: as slow as the first time.",
    ),
    "question": ScenarioWords(
        "one picture, eight different questions",
        "Good: a small part of a new picture's time. Bad: the picture is looked at each time.",
    ),
    "agent": ScenarioWords(
        "an agent that sends a new screenshot in each of 8 turns",
        "Good: turn 8 takes as long as turn 1, or a little longer. Bad: it grows with each turn.",
    ),
    "agent-window": ScenarioWords(
        "an agent that keeps its last three screenshots, 12 turns",
        "Good: not much more than turn 1, though what follows a dropped picture is read again.",
    ),
    "agent-drops": ScenarioWords(
        "an agent that drops screenshots when it has six, 12 turns",
        "Good: less than an agent that drops one in every turn, as fewer tokens are read again.",
    ),
    "stall": ScenarioWords(
        "six new pictures arrive while a text is written",
        "Good: the text hardly pauses. Bad: it stands still until the pictures are done.",
    ),
    "conc": ScenarioWords(
        "eight people at once, two questions each, every picture new",
        "Good: much is written, the first word comes soon, and pauses stay near their median.",
    ),
    "text": ScenarioWords(
        "one long text, then eight at once",
        "Good: eight together get several times what one gets. Bad: they wait for each other.",
    ),
    "right": ScenarioWords(
        "questions at once, compared with the same ones alone",
        "Good: yes everywhere. A no: requests change each other's answers, or mix up pictures.",
    ),
    "streams": ScenarioWords(
        "16 long texts at once, then 32",
        "Good: 32 together get more than 16. Bad: they get no more, or less.",
    ),
    "longagent": ScenarioWords(
        "an agent of 25 turns, twice",
        "Good: the last turn takes as long as those before, the second time, too.",
    ),
    "agents4": ScenarioWords(
        "four agents at once, 8 turns each",
        "Good: near the times of one agent alone, and the slowest not far from the median.",
    ),
    "small-mac": ScenarioWords(
        "two agents at once, whose conversations grow to 23,000 tokens each",
        "Good: nothing is read twice. Bad: the memory keeps only one of them.",
    ),
    "day": ScenarioWords(
        "a day's mix of requests",
        "Good: the end is as fast as the beginning. The fixed work shows how the machine changed.",
    ),
}
_NAMES = {
    "TTFT, first": f"{WAIT}, the first time",
    "TTFT, from the third on": f"{WAIT}, from the third time on",
    "slowest / median": "slowest of these, against their median",
    "TTFT, from the second on": f"{WAIT}, from the second question on",
    "turn 8 / turn 1": "turn 8 against turn 1",
    "not cached, mean from turn 5 on": "tokens read in a turn, mean from turn 5 on",
    "longest silence of the text": "longest pause of the text",
    "TTFT of the pictures": f"{WAIT} about a picture",
    "all users": "written for all together",
    "between tokens, median": "pause between tokens, median",
    "between tokens, p99": "pause between tokens, 99 of 100 are shorter",
    "between tokens, p99 / median": "the latter against the median",
    "clears of freed memory": "times that freed memory was returned",
    "one stream": "written for one text",
    "at once and alone (should be equal)": "answers at once are those alone",
    "A and B (should differ)": "other pictures, other answers",
    "A+B and B+A (should differ)": "the order of two pictures counts",
    "TTFT, last tenth against the first": f"{WAIT}, last tenth against the first",
}
_STREAMS = re.compile(r"(\d+) streams")
_TURN = re.compile(r"TTFT, turn (\d+)")
LOWER, _HIGHER = "\u2193", "\u2191"
_BETTER = {
    Unit.MILLISECONDS: LOWER,
    Unit.RATIO: LOWER,
    Unit.COUNT: LOWER,
    Unit.TOKENS: LOWER,
    Unit.TOKENS_PER_SECOND: _HIGHER,
}
_NO_QUALITY = ("prompt, last turn",)
"""Figures that are neither good nor bad."""
LEGEND = f"{LOWER}: lower is better, {_HIGHER}: higher is better"


def plain_name(name: str) -> str:
    """A figure's name in words."""
    if match := _STREAMS.fullmatch(name):
        return f"written for {match[1]} texts together"
    return _NAMES.get(name) or name.replace("TTFT", WAIT)


def better(name: str, unit: Unit) -> str:
    """An arrow to the better values of a figure; empty where there are none."""
    return "" if name in _NO_QUALITY else _BETTER.get(unit, "")


def is_detail(scenario: str, name: str) -> bool:
    """Whether a figure is one of so many that only the JSON has them: turns between others."""
    match = _TURN.fullmatch(name)
    return match is not None and scenario.startswith("agent-") and match[1] != "1"


def wanted(name: str) -> float:
    """The good value of a figure that is 1.0 or 0.0."""
    return 0.0 if "should differ" in name else 1.0
