"""The soak client classifies each answer of a scripted server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.soak.client import Client
from tests.soak.request import Ending, Kind, Outcome, Patience, Refusal, Request
from tests.unit.cli.scripted_server import ScriptedServer, echo, event, listening, text

FIELDS = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
BODY = json.dumps(FIELDS).encode()
COMPLETION = json.dumps(
    {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}
).encode()
REFUSAL = json.dumps({"error": {"code": "invalid_image", "message": "no"}}).encode()
WANTED = Refusal(400, "invalid_image")


def request(**changes: Any) -> Request:
    return Request(Kind.SHORT_TEXT, BODY, **changes)


async def outcome_of(server: ScriptedServer, request_sent: Request) -> Outcome:
    async with listening(server) as url, Client(url.removesuffix("/v1")) as client:
        return await client.send(request_sent)


def whole(body: bytes, status: int = 200) -> ScriptedServer:
    return ScriptedServer(lambda _: [(0.0, body)], status)


async def test_soak_client_reads_stream():
    server = ScriptedServer(echo)
    outcome = await outcome_of(server, request(is_stream=True))
    assert (outcome.ending, outcome.status, outcome.error) == (Ending.ANSWERED, 200, None)
    assert outcome.text
    assert outcome.ttft is not None
    assert server.requests == [FIELDS]


async def test_soak_client_reads_unstreamed_answer():
    outcome = await outcome_of(whole(COMPLETION), request())
    assert (outcome.ending, outcome.text, outcome.ttft) == (Ending.ANSWERED, "hi", None)


@pytest.mark.parametrize(
    ("server", "request_sent"),
    [
        (whole(b"{}", 500), request()),
        (whole(b"{}"), request()),
        (whole(b"oops"), request()),
        (ScriptedServer(lambda _: [(0.0, text("cut"))]), request(is_stream=True)),
        (
            ScriptedServer(lambda _: [(0.0, text("a") + event(error={"code": "x"}))]),
            request(is_stream=True),
        ),
        (whole(COMPLETION), request(refusal=WANTED)),
        (whole(b"{}", 400), request(refusal=WANTED)),
        (whole(REFUSAL, 500), request(refusal=WANTED)),
        (whole(REFUSAL, 400), request(refusal=Refusal(400, "invalid_value"))),
        (whole(REFUSAL, 400), request(patience=Patience(seconds=10))),
    ],
)
async def test_soak_client_reports_failed_answers(server: ScriptedServer, request_sent: Request):
    outcome = await outcome_of(server, request_sent)
    assert outcome.ending is Ending.FAILED
    assert outcome.status == server.status
    assert outcome.error


async def test_soak_client_reports_unreachable_server():
    async with listening(ScriptedServer()) as url:
        pass
    async with Client(url.removesuffix("/v1")) as client:
        outcome = await client.send(request())
    assert (outcome.ending, outcome.status) == (Ending.FAILED, None)


async def test_soak_client_accepts_expected_refusal():
    outcome = await outcome_of(whole(REFUSAL, 400), request(refusal=WANTED))
    assert (outcome.ending, outcome.status, outcome.error) == (Ending.REFUSED, 400, None)


async def test_soak_client_retries_after_full_queue():
    statuses = iter((429, 200))

    def answer(_: dict[str, Any]) -> list[tuple[float, bytes]]:
        server.status = next(statuses)
        return [(0.0, COMPLETION)]

    server = ScriptedServer(answer)
    async with listening(server) as url, Client(url.removesuffix("/v1")) as client:
        outcome = await client.send(request())
        assert client.waits == 1
    assert (outcome.ending, len(server.requests)) == (Ending.ANSWERED, 2)


@pytest.mark.parametrize("patience", [Patience(seconds=0.2), Patience(reads=3)])
async def test_soak_client_leaves_when_patience_ends(patience: Patience):
    server = ScriptedServer(lambda _: [(0.02, text("more"))] * 50)
    outcome = await outcome_of(server, request(is_stream=True, patience=patience))
    assert outcome == Outcome(kind=Kind.SHORT_TEXT, ending=Ending.LEFT)
    assert server.requests == [FIELDS]


async def test_soak_client_leaves_during_upload():
    bodies: list[bytes] = []

    class UploadRecorder(ScriptedServer):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            while (message := await receive())["type"] == "http.request":
                bodies.append(message["body"])

    outcome = await outcome_of(UploadRecorder(), request(patience=Patience(upload_share=0.5)))
    assert outcome.ending is Ending.LEFT
    assert b"".join(bodies) == BODY[: len(BODY) // 2]
