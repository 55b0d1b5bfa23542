"""Decisions of the embedded model about drawn pictures, over HTTP."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pytest

from tests.support.daemons import Daemon
from tests.support.images import canvas, draw_shape, image_part, one_shape

pytestmark = pytest.mark.e2e

COLOURS = ["red", "blue", "green", "yellow", "black"]
SHAPES = ["circle", "square", "triangle", "star"]


def url_of(picture: Any) -> str:
    url: str = image_part(picture)["image_url"]["url"]
    return url


def post(daemon: Daemon, questions: dict[str, Any], **body: Any) -> httpx.Response:
    return httpx.post(
        f"{daemon.url}/v1/decisions", json={"questions": questions, **body}, timeout=60
    )


def answers(daemon: Daemon, questions: dict[str, Any], **body: Any) -> dict[str, Any]:
    answer = post(daemon, questions, **body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["answers"]
    return found


def choice(instructions: str, criteria: list[str], kind: str = "choice") -> dict[str, Any]:
    return {
        "type": kind,
        "instructions": instructions,
        "criteria": criteria,
        "list_options": False,
    }


@pytest.mark.parametrize(
    ("shape", "colour"), [("circle", "red"), ("square", "blue"), ("star", "green")]
)
def test_answers_about_drawn_pictures_are_true(daemon: Daemon, shape: str, colour: str) -> None:
    there = {**choice("Is there a {label}?", SHAPES), "type": "multi_label"}
    questions = {
        "colour": choice(f"What colour is the {shape}?", COLOURS),
        "shape": choice("What shape is this?", SHAPES),
        "rank": choice(f"What colour is the {shape}?", COLOURS, "ranking"),
        "count": choice(f"How many {shape}s are there?", ["none", "one", "two"], "score"),
        "is": {"type": "bool", "instructions": f"Is there a {shape}?"},
        "is not": {"type": "bool", "instructions": "Is there a triangle?"},
        "there": there,
    }
    found = answers(daemon, questions, images=[url_of(one_shape(shape, colour))])
    assert found["colour"]["value"] == found["colour"]["greedy"] == colour
    assert found["shape"]["value"] == found["shape"]["greedy"] == shape
    assert found["rank"]["value"][0] == colour
    assert round(found["count"]["value"]) == found["count"]["greedy"] == 1
    assert found["is"]["value"] is True
    assert found["is not"]["value"] is False
    assert found["there"]["value"] == [shape]
    for answer in (found["colour"], found["shape"], found["count"]):
        assert sum(answer["probabilities"].values()) == pytest.approx(1.0)


def test_value_equals_answer_in_chat(daemon: Daemon) -> None:
    picture = draw_shape(canvas(), "circle", "red", (120, 220), 70)
    draw_shape(picture, "square", "blue", (320, 220), 70)
    for text, options in (
        ("What colour is the square?", COLOURS),
        ("What shape is on the left?", SHAPES),
    ):
        messages = [
            {"role": "user", "content": [image_part(picture), {"type": "text", "text": text}]}
        ]
        written = daemon.client().chat.completions.create(
            model="demo", messages=messages, temperature=0, max_tokens=10
        )
        found = answers(daemon, {"q": choice(text, options)}, images=[url_of(picture)])
        assert found["q"]["value"] == written.choices[0].message.content


def test_questions_follow_conversation(daemon: Daemon) -> None:
    messages = [
        {"role": "user", "content": [image_part(one_shape("star", "blue"))]},
        {"role": "assistant", "content": "A blue star."},
    ]
    question = choice("What colour is the star?", COLOURS)
    assert answers(daemon, {"q": question}, messages=messages)["q"]["value"] == "blue"


def test_order_of_options_changes_no_probability(daemon: Daemon) -> None:
    body = {"images": [url_of(one_shape("square", "black"))]}
    for lists in (True, False):
        question = choice("What colour is it?", COLOURS) | {"list_options": lists}
        backwards = question | {"criteria": COLOURS[::-1]}
        found = answers(daemon, {"a": question, "b": backwards}, **body)
        probabilities = [found[name]["probabilities"] for name in "ab"]
        # On a GPU, rows of 16 bits are rounded by their place in a batch.
        assert probabilities[0] == pytest.approx(probabilities[1], rel=1e-2, abs=1e-5)


def test_usage_counts_and_nothing_is_left(daemon: Daemon) -> None:
    question = choice("What shape is this?", SHAPES)
    questions = {f"{i}": question | {"instructions": f"{i} shapes?"} for i in range(4)}
    answer = post(daemon, questions, images=[url_of(one_shape("star", "purple"))])
    usage = answer.json()["usage"]
    assert usage["output_tokens"] == 0
    assert usage["prompt_tokens"] == usage["input_tokens"] == usage["total_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] / 2
    assert len(usage["images"]) == 1
    assert "prefill;dur=" in answer.headers["Server-Timing"]
    daemon.wait_idle()


def test_client_that_leaves_ends_all_questions(tiny_daemon: Daemon) -> None:
    question = {"type": "bool", "instructions": "Is it?"}
    body = {"state": "hi " * 500, "questions": {f"{i}": question for i in range(1000)}}
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{tiny_daemon.url}/v1/decisions", json=body, timeout=0.7)
    tiny_daemon.wait_idle()
    assert tiny_daemon.num_in_flight() == 0


def test_running_answers_are_not_silenced(tiny_daemon: Daemon) -> None:
    """While a request with many options is scored, a stream gets tokens."""
    times = list[float]()
    ended = threading.Event()

    def stream() -> None:
        client = tiny_daemon.client()
        chunks = client.chat.completions.create(
            model="model",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            max_tokens=1500,
        )
        for _ in chunks:
            times.append(time.monotonic())
            if ended.is_set():
                return

    worker = threading.Thread(target=stream)
    worker.start()
    try:
        while len(times) < 5:
            assert worker.is_alive()
            time.sleep(0.01)
        started_at = time.monotonic()
        options = [f"option {i}" for i in range(400)]
        question = {"instructions": "Which?", "criteria": options, "list_options": False}
        found = answers(tiny_daemon, {"q": question}, model="model", state="hi")
        ended_at = time.monotonic()
    finally:
        ended.set()
        worker.join()
    assert len(found["q"]["probabilities"]) == 400
    during = [at for at in times if started_at <= at <= ended_at]
    assert len(during) >= 10


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"q": choice("?", [str(i) for i in range(10_000)])}, "max_options"),
    ({str(i): choice("?", ["a", "b"]) for i in range(3000)}, "max_options"),
    ({"q": choice("?", ["a", "a"])}, "twice"),
    ({"q": choice("?", ["a", ""])}, "empty"),
    ({"q": choice("?", ["a", "x" * 1_000_000])}, "256"),
    ({"q": choice("?", ["a", "🙂" * 300])}, "256"),
    ({"q": choice("x" * 5_000_000, ["a", "b"])}, "bytes of text"),
    ({"q" * 100_000: choice("?", ["a"])}, "1024 characters"),
    ({"q": choice("?", ["a"])}, "at least 2"),
    ({"q": choice("?", ["a", "<|im_end|>"])}, "control token"),
    ({"q": choice("?", ["a", "b", "c"], "poem")}, "must be"),
]


@pytest.mark.parametrize(("questions", "part"), HOSTILE, ids=[part for _, part in HOSTILE])
def test_hostile_questions_are_refused(
    daemon: Daemon, questions: dict[str, Any], part: str
) -> None:
    answer = post(daemon, questions, state="hi")
    assert answer.status_code == 400, answer.text[:500]
    error = answer.json()["error"]
    assert part in error["message"]
    assert len(answer.content) < 2000
    daemon.wait_idle()


def test_option_that_begins_another_keeps_its_share(daemon: Daemon) -> None:
    question = choice("What colour is it?", ["red", "red circle", "r"])
    found = answers(daemon, {"q": question}, images=[url_of(one_shape("circle", "red"))])["q"]
    assert found["value"] == found["greedy"] == "red"
    assert found["probabilities"]["red"] > 0.9
