"""Requests for decisions: what the model is asked, errors by field, and answers as JSON."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from tests.support.image_files import data_url, image_file
from tests.unit.api.requests import user
from tests.unit.api.scripted_engine import ScriptedEngine
from vlm_server.api.dialects.openai.questions import Question, read_question
from vlm_server.protocol import Decision, Finished, ImagePart, TextPart, Usage

PNG = data_url(image_file("PNG", (9, 7)))
CHOICE = {"instructions": "Which?", "criteria": ["b", "a"]}


def decided(*decisions: Decision) -> Any:
    return lambda request_id: Finished(request_id, Usage(7, 0, 3), decisions=decisions)


async def decide(client: httpx.AsyncClient, questions: Any, **fields: Any) -> httpx.Response:
    body = {"model": "demo", "state": "hi", "questions": questions} | fields
    return await client.post("/v1/decisions", json=body)


def inputs_of(**fields: Any) -> list[tuple[str, tuple[str, ...]]]:
    return [(each.text, each.options) for each in read_question("q", Question(**fields), "q")[1]]


def test_options_are_listed_sorted_and_scored_in_their_order() -> None:
    text = "Which?\n\nOptions:\n- a: A\n- b\n\nReply with one option alone."
    criteria = {"b": None, "a": "A"}
    for kind in ("choice", "ranking"):
        asked = inputs_of(instructions="Which?", type=kind, criteria=criteria)
        assert asked == [(text, ("b", "a"))]
    assert inputs_of(instructions="Which?", criteria=["b", "a"], list_options=False) == [
        ("Which?", ("b", "a"))
    ]


def test_yes_and_no_are_scored_in_both_spellings() -> None:
    forms = ("yes", "Yes", "no", "No")
    asked = inputs_of(instructions="Is it?", type="bool", criteria={"true": "it is"})
    assert asked == [("Is it?\nYes: it is\n\nReply with yes or no alone.", forms)]
    asked = inputs_of(instructions="Which?", type="multi_label", criteria=["a", "b"])
    assert [options for _, options in asked] == [forms, forms]
    assert "Does this apply: b" in asked[1][0]
    asked = inputs_of(
        instructions="Is it {label}?", type="multi_label", criteria=["a"], list_options=False
    )
    assert asked == [("Is it a?", forms)]


def test_levels_are_numbered_from_zero() -> None:
    asked = inputs_of(instructions="How good?", type="score", criteria=["bad", "good"])
    text = "How good?\n\n0: bad\n1: good\n\nReply with the number alone."
    assert asked == [(text, ("0", "1"))]


async def test_state_and_pictures_are_one_message_before_questions(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (decided(Decision((-1.0, -2.0), 0)),)
    answer = await decide(client, {"q": CHOICE}, images=[PNG], state={"a": 1})
    assert answer.status_code == 200, answer.text
    (submit,) = engine.submitted
    (message,) = submit.messages
    assert message.content == (ImagePart(0), TextPart('{\n  "a": 1\n}'))
    (asked,) = submit.inputs
    assert asked.options == ("b", "a")
    assert asked.param == "questions.q"


async def test_equal_spellings_are_added_once(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    """To a model without case, `Yes` is `yes`: the engine gives it no probability of its own."""
    yes, no = math.log(0.2), math.log(0.3)
    engine.script = (decided(Decision((yes, -math.inf, no, -math.inf), 2)),)
    answer = await decide(client, {"q": {"type": "bool", "instructions": "Is it?"}})
    (asked,) = engine.submitted[0].inputs
    assert (asked.options, asked.num_spellings) == (("yes", "Yes", "no", "No"), 2)
    found = answer.json()["answers"]["q"]
    assert found["probability"] == pytest.approx(0.4)
    assert found["logprobs"] == pytest.approx({"true": yes, "false": no})
    assert (found["value"], found["greedy"]) == (False, False)


async def test_answers_are_those_of_mlx_vlm(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    half, low = math.log(0.5), math.log(0.125)
    yes_or_no = Decision((math.log(0.125), math.log(0.25), low, low), 1)
    engine.script = (
        decided(
            Decision((low, half), 1),
            yes_or_no,
            Decision((half, low, low), 0),
            yes_or_no,
            Decision((low, low, half, low), 2),
            Decision((low, half), 1),
        ),
    )
    questions = {
        "choice": CHOICE,
        "bool": {"instructions": "Is it?", "type": "bool"},
        "score": {"instructions": "How?", "type": "score", "criteria": ["a", "b", "c"]},
        "labels": {"instructions": "Which?", "type": "multi_label", "criteria": ["x", "y"]},
        "ranking": {**CHOICE, "type": "ranking"},
    }
    body = (await decide(client, questions)).json()
    answers = body["answers"]
    assert list(answers) == list(questions)
    assert answers["choice"]["value"] == answers["choice"]["greedy"] == "a"
    assert answers["choice"]["probabilities"] == pytest.approx({"b": 0.2, "a": 0.8})
    assert answers["choice"]["logprobs"] == pytest.approx({"b": low, "a": half})
    assert answers["choice"]["metadata"] == {"confidence": pytest.approx(0.8)}
    assert answers["bool"]["value"] is answers["bool"]["greedy"] is True
    assert answers["bool"]["probability"] == pytest.approx(0.6)
    assert answers["score"]["value"] == pytest.approx(0.5)
    assert answers["score"]["greedy"] == 0
    assert answers["labels"]["value"] == answers["labels"]["greedy"] == ["x"]
    assert answers["labels"]["probabilities"] == pytest.approx({"x": 0.6, "y": 2 / 7})
    assert answers["ranking"]["value"] == ["a", "b"]
    assert body["usage"]["prompt_tokens"] == body["usage"]["input_tokens"] == 7
    assert body["usage"]["output_tokens"] == 0
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_rounding_makes_no_logprob_positive(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (decided(Decision((-1e-9, math.log(1e-6), -50.0, -50.0), 0)),)
    question = {"instructions": "Is it?", "type": "bool"}
    answer = (await decide(client, {"a": question})).json()["answers"]["a"]
    assert answer["logprobs"]["true"] == 0
    assert answer["value"] is True


async def test_tiny_probabilities_add_up_to_one(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (decided(Decision((-5000.0, -5001.0), 0)),)
    answer = (await decide(client, {"q": CHOICE})).json()["answers"]["q"]
    assert sum(answer["probabilities"].values()) == pytest.approx(1.0)


async def test_threshold_decides(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script = (decided(Decision((math.log(0.6), -50.0, math.log(0.4), -50.0), 0)),)
    question = {"instructions": "Is it?", "type": "bool"}
    for threshold, value in ((0.5, True), (0.7, False)):
        answer = await decide(client, {"q": {**question, "threshold": threshold}})
        assert answer.json()["answers"]["q"]["value"] is value


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"questions": {}}, "questions", ""),
    ({"questions": {"q": {"criteria": ["a", "b"]}}}, "questions.q.instructions", ""),
    ({"questions": {"q": {**CHOICE, "type": "poem"}}}, "questions.q.type", "'ranking'"),
    ({"questions": {"q": {**CHOICE, "colour": 1}}}, "questions.q.colour", ""),
    ({"questions": {"q": {"instructions": "?"}}}, "questions.q.criteria", "at least 2"),
    ({"questions": {"q": {**CHOICE, "criteria": ["a"]}}}, "questions.q.criteria", "at least 2"),
    ({"questions": {"q": {**CHOICE, "criteria": ["a", "a"]}}}, "questions.q.criteria", "twice"),
    ({"questions": {"q": {**CHOICE, "criteria": ["a", ""]}}}, "questions.q.criteria", "empty"),
    (
        {"questions": {"q": {**CHOICE, "type": "score", "criteria": {"a": "b", "c": "d"}}}},
        "questions.q.criteria",
        "list",
    ),
    (
        {"questions": {"q": {"instructions": "?", "type": "bool", "criteria": {"maybe": "b"}}}},
        "questions.q.criteria",
        "`true` and `false`",
    ),
    (
        {"questions": {"q": {**CHOICE, "type": "multi_label", "list_options": False}}},
        "questions.q.instructions",
        "{label}",
    ),
    ({"questions": {"q": {**CHOICE, "threshold": 2}}}, "questions.q.threshold", ""),
    ({"state": None}, "state", "must be given"),
    ({"state": ""}, "state", "empty"),
    ({"messages": [user("hi")]}, "messages", "in place of"),
    ({"audio": "UklGRg=="}, "audio", ""),
    ({"images": ["picture.png"]}, "images[0]", ""),
    (
        {"questions": {"q": {**CHOICE, "criteria": [str(i) for i in range(10_000)]}}},
        "questions",
        "max_options",
    ),
]


@pytest.mark.parametrize(("fields", "param", "part"), BAD, ids=lambda v: str(v)[:60])
async def test_bad_request_is_refused_by_field(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str, part: str
) -> None:
    answer = await client.post(
        "/v1/decisions",
        json={"model": "demo", "state": "hi", "questions": {"q": CHOICE}, **fields},
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert part in error["message"]
