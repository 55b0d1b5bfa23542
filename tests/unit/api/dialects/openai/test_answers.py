"""Chat completions, whole and streamed, and failures before and after the first token."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import msgspec
import pytest

from tests.unit.api.requests import ROUTE, chat
from tests.unit.api.scripted_engine import (
    ScriptedEngine,
    Step,
    ended,
    failed,
    finished,
    scored,
    text,
)
from vlm_server.errors import RequestTooCostly
from vlm_server.protocol import (
    Accepted,
    Finished,
    ImageUse,
    TokenLogprob,
    TokenText,
    Usage,
    VideoUse,
)

USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 2,
    "total_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 3},
    "completion_tokens_details": {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    },
}


def events(answer: httpx.Response) -> list[Any]:
    """The data of each event; `[DONE]` stays a string."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *lines, rest = answer.text.split("\n\n")
    assert rest == ""
    data = [line.removeprefix("data: ") for line in lines]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


async def test_chat_completion_has_its_fields(client: httpx.AsyncClient) -> None:
    answer = await client.post(ROUTE, json=chat())
    body = answer.json()
    assert body.pop("created") > 1_700_000_000
    assert body.pop("id") == f"chatcmpl-{answer.headers['x-request-id']}"
    assert body == {
        "object": "chat.completion",
        "model": "demo",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello world", "refusal": None},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "usage": USAGE,
    }


async def test_usage_has_processed_size_of_each_image(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    images = (ImageUse(308, 196, 77), ImageUse(28, 56, 2))
    engine.script = (
        text("A cat"),
        ended(),
        lambda request_id: Finished(request_id, Usage(7, 2, 3), images=images),
    )
    reported = [
        {"width": 308, "height": 196, "tokens": 77},
        {"width": 28, "height": 56, "tokens": 2},
    ]
    whole = (await client.post(ROUTE, json=chat())).json()
    assert whole["usage"] == {**USAGE, "images": reported}
    options = {"include_usage": True}
    stream = await client.post(ROUTE, json=chat(stream=True, stream_options=options))
    assert events(stream)[-2]["usage"] == {**USAGE, "images": reported}


async def test_usage_has_sampled_frames_of_each_video(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    reported: list[dict[str, Any]] = [
        {"frames": 2, "seconds": 5.5, "tokens": 96, "truncated": False}
        | {"width": 64, "height": 32, "times": [0.0, 5.5]},
        {"frames": 1, "seconds": 0.0, "tokens": 32, "truncated": True}
        | {"width": 32, "height": 64, "times": [0.0]},
    ]
    videos = tuple(msgspec.convert(each, VideoUse) for each in reported)
    engine.script = (
        text("A cat"),
        ended(),
        lambda request_id: Finished(request_id, Usage(7, 2, 3), videos=videos),
    )
    whole = (await client.post(ROUTE, json=chat())).json()
    assert whole["usage"] == {**USAGE, "videos": reported}
    options = {"include_usage": True}
    stream = await client.post(ROUTE, json=chat(stream=True, stream_options=options))
    assert events(stream)[-2]["usage"] == {**USAGE, "videos": reported}


async def test_chat_stream_chunks_have_role_text_and_end(client: httpx.AsyncClient) -> None:
    *chunks, done = events(await client.post(ROUTE, json=chat(stream=True)))
    assert done == "[DONE]"
    assert [
        (chunk["choices"][0]["delta"], chunk["choices"][0]["finish_reason"]) for chunk in chunks
    ] == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "Hello"}, None),
        ({"content": " world"}, None),
        ({}, "stop"),
    ]
    assert {(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks} == {
        (chunks[0]["id"], chunks[0]["created"], "demo")
    }
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert all("usage" not in chunk for chunk in chunks)


def token(text: str, logprob: float = -0.5, *top: tuple[str, float]) -> TokenLogprob:
    return TokenLogprob(
        TokenText(text, logprob), tuple(TokenText(*alternative) for alternative in top)
    )


def shown(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


async def test_chat_completion_has_log_probabilities(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    entry = token(" é", -0.25, (" é", -0.25), ("<|end|>", -math.inf))
    partial = TokenLogprob(TokenText("\ufffd", math.nan, b"\xe6"), ())
    engine.script = (scored(" é", entry), scored("", partial))
    engine.script += (ended(), finished())
    answer = (await client.post(ROUTE, json=chat(logprobs=True, top_logprobs=2))).json()
    assert answer["choices"][0]["logprobs"] == {
        "content": [
            {**shown(" é", -0.25), "top_logprobs": [shown(" é", -0.25), shown("<|end|>", -9999.0)]},
            {**shown("\ufffd", -9999.0), "bytes": [0xE6], "top_logprobs": []},
        ],
        "refusal": None,
    }
    assert answer["choices"][0]["message"]["content"] == " é"


async def test_streamed_log_probabilities_wait_for_next_text(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (
        *(scored("", token("1")), scored("12", token("2")), scored("3", token("3"))),
        *(scored("", token("4")), scored("", token("5")), ended(), finished()),
    )
    *chunks, done = events(await client.post(ROUTE, json=chat(stream=True, logprobs=True)))
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [
        (
            choice["delta"].get("content"),
            choice["logprobs"] and [entry["token"] for entry in choice["logprobs"]["content"]],
            choice["finish_reason"],
        )
        for choice in choices
    ] == [
        ("", None, None),
        ("12", ["1", "2"], None),
        ("3", ["3"], None),
        ("", ["4", "5"], None),
        (None, None, "stop"),
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_failure_before_text_has_its_status_despite_held_tokens(
    client: httpx.AsyncClient, engine: ScriptedEngine, stream: bool
) -> None:
    engine.script = (scored("", token("1")), failed("engine_died", "The engine ended."))
    assert (await client.post(ROUTE, json=chat(stream=stream, logprobs=True))).status_code == 502


TWO_CHOICES: tuple[Step, ...] = (
    *(scored("", token("1"), choice=1), scored("He", token("2")), text("No", 1)),
    *(ended("stop", 1), scored("", token("3")), text("llo"), ended("length"), finished()),
)
"""Choice 1 has its end while choice 0 goes on."""


async def test_whole_choices_have_their_own_text_and_end(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = TWO_CHOICES
    answer = (await client.post(ROUTE, json=chat(n=2, logprobs=True))).json()
    assert [
        (
            choice["index"],
            choice["message"]["content"],
            [entry["token"] for entry in choice["logprobs"]["content"]],
            choice["finish_reason"],
        )
        for choice in answer["choices"]
    ] == [(0, "Hello", ["2", "3"], "length"), (1, "No", ["1"], "stop")]
    assert answer["usage"] == USAGE


async def test_streamed_choices_have_their_own_role_and_end(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = TWO_CHOICES
    body = chat(n=2, logprobs=True, stream=True, stream_options={"include_usage": True})
    *chunks, usage, done = events(await client.post(ROUTE, json=body))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert len(choices) == len(chunks), "one choice a chunk"
    role = {"role": "assistant", "content": ""}
    assert [(each["index"], each["delta"], each["finish_reason"]) for each in choices] == [
        (0, role, None),
        (0, {"content": "He"}, None),
        (1, role, None),
        (1, {"content": "No"}, None),
        (1, {}, "stop"),
        (0, {"content": "llo"}, None),
        (0, {}, "length"),
    ]
    tokens = [each["logprobs"] and each["logprobs"]["content"][0]["token"] for each in choices]
    assert tokens == [None, "2", None, "1", None, "3", None]
    assert (usage["choices"], usage["usage"], done) == ([], USAGE, "[DONE]")


async def test_choices_without_text_have_role_and_end(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (ended("stop", 1), ended("length", 0), finished())
    *chunks, done = events(await client.post(ROUTE, json=chat(n=2, stream=True)))
    found = [(choice["index"], choice["finish_reason"]) for c in chunks for choice in c["choices"]]
    assert found == [(1, None), (1, "stop"), (0, None), (0, "length")]
    assert done == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
async def test_failure_after_empty_choice_has_its_status(
    client: httpx.AsyncClient, engine: ScriptedEngine, stream: bool
) -> None:
    engine.script = (ended("stop", 1), failed("engine_died", "The engine ended."))
    assert (await client.post(ROUTE, json=chat(n=2, stream=stream))).status_code == 502


@pytest.mark.parametrize("n", [1, 2])
async def test_answer_without_every_choice_is_500(
    client: httpx.AsyncClient, engine: ScriptedEngine, n: int
) -> None:
    engine.script = (text("a", n - 1), finished())
    assert (await client.post(ROUTE, json=chat(n=n))).status_code == 500


async def test_requested_usage_is_last_chunk(client: httpx.AsyncClient) -> None:
    body = chat(stream=True, stream_options={"include_usage": True})
    *chunks, last, done = events(await client.post(ROUTE, json=body))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"], done) == ([], USAGE, "[DONE]")


async def test_empty_answer_is_valid_completion(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (ended("length"), finished(Usage(7, 1)))
    answer = (await client.post(ROUTE, json=chat())).json()
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["choices"][0]["finish_reason"] == "length"
    role, finish, done = events(await client.post(ROUTE, json=chat(stream=True)))
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert finish["choices"][0]["finish_reason"] == "length"
    assert done == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("invalid_image", 400, "invalid_request_error"),
        ("context_length_exceeded", 400, "invalid_request_error"),
        ("internal_error", 500, "server_error"),
        ("engine_died", 502, "server_error"),
        ("engine_unavailable", 503, "server_error"),
    ],
)
async def test_failure_before_first_token_has_its_status(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    stream: bool,
    code: str,
    status: int,
    kind: str,
) -> None:
    engine.script = (text(""), failed(code, "It can't be read.", "messages[0].content[0]"))
    answer = await client.post(ROUTE, json=chat(stream=stream))
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"] == {
        "message": "It can't be read.",
        "type": kind,
        "param": "messages[0].content[0]",
        "code": code,
    }
    assert ("retry-after" in answer.headers) == (status in (502, 503))


@pytest.mark.parametrize("stream", [False, True])
async def test_temporary_refusal_has_retry_after(
    client: httpx.AsyncClient, engine: ScriptedEngine, stream: bool
) -> None:
    engine.refusal = RequestTooCostly("Too large.", retry_after_seconds=99.5)
    answer = await client.post(ROUTE, json=chat(stream=stream))
    assert (answer.status_code, answer.headers["retry-after"]) == (413, "100")
    assert answer.json()["error"] == {
        "message": "Too large.",
        "type": "invalid_request_error",
        "param": None,
        "code": "request_too_costly",
    }


async def test_failure_after_first_token_ends_stream_without_done(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (text("He"), failed("engine_died", "The engine ended."))
    _, content, error = events(await client.post(ROUTE, json=chat(stream=True)))
    assert content["choices"][0]["delta"] == {"content": "He"}
    assert error == {
        "error": {
            "message": "The engine ended.",
            "type": "server_error",
            "param": None,
            "code": "engine_died",
        }
    }


async def test_failure_late_in_whole_answer_has_its_status(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (text("He"), failed("engine_died", "The engine ended."))
    assert (await client.post(ROUTE, json=chat())).status_code == 502


def explode(_: str) -> Accepted:
    raise ZeroDivisionError("secret detail")


@pytest.mark.parametrize("script", [(explode,), (text(""), explode), (text("a"), explode)])
@pytest.mark.parametrize("stream", [False, True])
async def test_unforeseen_error_is_logged_and_hidden(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    caplog: pytest.LogCaptureFixture,
    script: tuple[Any, ...],
    stream: bool,
) -> None:
    engine.script = script
    answer = await client.post(ROUTE, json=chat(stream=stream))
    if stream and len(events_so_far := answer.text.split("\n\n")) > 1:
        error = json.loads(events_so_far[-2].removeprefix("data: "))["error"]
    else:
        assert answer.status_code == 500
        error = answer.json()["error"]
    assert error["code"] == "internal_error"
    assert "secret" not in answer.text
    assert "secret detail" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "status"),
    [((finished(is_aborted=True),), 503), ((text(""), lambda i: Accepted(i)), 500)],
)
async def test_answer_given_up_by_engine_is_error(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    script: tuple[Any, ...],
    status: int,
    stream: bool,
) -> None:
    engine.script = script
    assert (await client.post(ROUTE, json=chat(stream=stream))).status_code == status


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_lost_before_submit_is_503(
    client: httpx.AsyncClient, engine: ScriptedEngine, stream: bool
) -> None:
    engine.loses_requests = True
    answer = await client.post(ROUTE, json=chat(stream=stream))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "engine_unavailable"
