"""Soak requests depend on the seed alone, and cover every kind."""

from __future__ import annotations

import json
import random
from itertools import islice

import pytest

from tests.soak.mix import WEIGHTS, Gallery, User, refills, schemas
from tests.soak.request import Kind, Patience, Request

COUNT = 600


def requests_of(seed: int, number: int = 0, count: int = COUNT) -> list[Request]:
    user = User(Gallery(seed), seed, number)
    return [user.next() for _ in range(count)]


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return requests_of(1)


def test_soak_requests_are_reproducible_by_seed(requests: list[Request]):
    assert requests_of(1) == requests


def test_soak_requests_differ_between_seeds_and_users(requests: list[Request]):
    bodies = {request.body for request in requests}
    for others in (requests_of(2, count=50), requests_of(1, number=1, count=50)):
        assert len(bodies & {request.body for request in others}) < 5


def test_soak_refills_are_fixed_and_shared_with_no_user(requests: list[Request]):
    assert refills(1) == refills(1)
    assert not {refill.body for refill in refills(1)} & {request.body for request in requests}


def test_soak_warm_up_schemas_are_distinct():
    wanted = [json.loads(request.body)["response_format"] for request in schemas()]
    assert len({json.dumps(response_format) for response_format in wanted}) == len(wanted) == 64


def test_soak_request_kinds_follow_weights(requests: list[Request]):
    total = sum(WEIGHTS.values())
    assert set(WEIGHTS) | {Kind.REFILL} == set(Kind)
    for kind, weight in WEIGHTS.items():
        share = sum(request.kind is kind for request in requests) / COUNT
        assert 0.3 * weight / total < share < 3 * weight / total, kind


def test_soak_users_leave_at_every_stage(requests: list[Request]):
    leaving = [r.patience for r in requests if r.patience != Patience()]
    assert 0.05 * COUNT < len(leaving) < 0.2 * COUNT
    for stage in ("upload_share", "seconds", "reads"):
        assert any(getattr(p, stage) != getattr(Patience(), stage) for p in leaving)
    for request in requests:
        if request.patience.reads < 100:
            assert json.loads(request.body)["stream"]


def test_soak_json_requests_never_ignore_eos(requests: list[Request]):
    bodies = [json.loads(request.body) for request in requests if request.kind is Kind.JSON]
    assert not any(body.get("ignore_eos") for body in bodies)


def test_soak_sends_every_malformed_request(requests: list[Request]):
    refusals = {request.refusal for request in requests if request.kind is Kind.MALFORMED}
    assert {refusal.code for refusal in refusals if refusal} == {
        "unsupported_parameter",
        "invalid_value",
        "model_not_found",
        "invalid_image",
        "invalid_video",
        "context_length_exceeded",
    }
    assert all((r.refusal is None) == (r.kind is not Kind.MALFORMED) for r in requests)


def test_soak_repeats_known_images_only(requests: list[Request]):
    def urls(kind: Kind) -> list[str]:
        bodies = [json.loads(request.body) for request in requests if request.kind is kind]
        return [b["messages"][0]["content"][0]["image_url"]["url"] for b in bodies]

    assert len(set(urls(Kind.NEW_IMAGE))) == len(urls(Kind.NEW_IMAGE))
    assert len(set(urls(Kind.SAME_AGAIN))) < 10 < len(urls(Kind.SAME_AGAIN))


def test_soak_conversation_grows_by_answers_then_restarts():
    user = User(Gallery(3), 3, 0)
    lengths = []
    turns = (request for request in iter(user.next, None) if request.kind is Kind.CONVERSATION)
    for turn, request in enumerate(islice(turns, 16)):
        messages = json.loads(request.body)["messages"]
        lengths.append(len(messages))
        if len(messages) > 1:
            assert messages[-2] == {"role": "assistant", "content": f"answer {turn - 1}"}
        user.hear(request, f"answer {turn}")
    assert lengths == [1, 3, 5, 7, 9, 11, 1, 3, 5, 7, 9, 11, 1, 3, 5, 7]


def test_soak_history_omits_unanswered_turns():
    user = User(Gallery(3), 3, 0)
    turns = (request for request in iter(user.next, None) if request.kind is Kind.CONVERSATION)
    assert [len(json.loads(r.body)["messages"]) for r in islice(turns, 3)] == [1, 1, 1]


def test_soak_requests_ignore_global_random_state(requests: list[Request]):
    random.seed(99)
    assert requests_of(1, count=20) == requests[:20]
