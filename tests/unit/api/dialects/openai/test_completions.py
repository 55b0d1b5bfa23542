"""Legacy text completions: fields, answers and streams, as JSON and by OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from msgspec import structs

from tests.unit.api.conftest import listening
from tests.unit.api.scripted_engine import ScriptedEngine, ended, failed, finished, scored, text
from vlm_server.api.dialects.openai.completions import NEUTRAL, CompletionRequest
from vlm_server.protocol import Delta, SamplingParams, TokenLogprob, Tokens, TokenText, Usage

ROUTE = "/v1/completions"


def body(prompt: Any = "Once", **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": prompt, **fields}


SAMPLED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"max_tokens": 5}, {"max_tokens": 5}),
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"top_p": 0.5}, {"top_p": 0.5}),
    ({"seed": 4}, {"seed": 4}),
    ({"stop": "END"}, {"stop": ("END",)}),
    ({"presence_penalty": 1}, {"presence_penalty": 1.0}),
    ({"frequency_penalty": 1}, {"frequency_penalty": 1.0}),
    ({"logit_bias": {"5": 1}}, {"logit_bias": {5: 1.0}}),
    ({"logprobs": 0}, {"logprobs": 0}),
    ({"logprobs": 5}, {"logprobs": 5}),
    ({"top_k": 3}, {"top_k": 3}),
    ({"min_p": 0.5}, {"min_p": 0.5}),
    ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"min_tokens": 3}, {"min_tokens": 3}),
    ({"min_tokens": 40}, {"min_tokens": 40, "max_tokens": 40}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
    ({"response_format": {"type": "json_object"}}, {"json_schema": '{"type":"object"}'}),
    ({"n": 1}, {"n": 1}),
    ({"best_of": 1, "echo": False, "suffix": None, "user": "x"}, {}),
]


@pytest.mark.parametrize(("fields", "sampling"), SAMPLED, ids=str)
async def test_completion_fields_reach_engine(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    fields: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    answer = await client.post(ROUTE, json=body(**fields))
    assert answer.status_code == 200, answer.text
    (submit,) = engine.submitted
    assert submit.sampling == SamplingParams(**{"max_tokens": 16, **sampling})
    assert (submit.prompt, submit.messages, submit.count_only) == ("Once", (), False)


def test_every_completion_field_has_test() -> None:
    tried = {name for fields, _ in SAMPLED for name in fields}
    others = {"model", "prompt", "stream", "stream_options"}
    assert {field.name for field in structs.fields(CompletionRequest)} <= tried | others


@pytest.mark.parametrize(
    ("prompt", "submitted_prompt"),
    [("a", "a"), (["a"], "a"), ([5, 6], (5, 6)), ([[5, 6]], (5, 6))],
    ids=str,
)
async def test_completion_prompt_is_read_in_every_spelling(
    client: httpx.AsyncClient, engine: ScriptedEngine, prompt: Any, submitted_prompt: Any
) -> None:
    assert (await client.post(ROUTE, json=body(prompt))).status_code == 200
    assert engine.submitted[0].prompt == submitted_prompt


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        (body(["a", "b"]), "prompt"),
        (body([[1], [2]]), "prompt"),
        (body([]), "prompt"),
        (body([1, "a"]), "prompt"),
        (body([-1]), "prompt"),
        (body([True]), "prompt"),
        (body(echo=True), "echo"),
        (body(suffix="end"), "suffix"),
        (body(best_of=2), "best_of"),
        (body(logprobs=6), "logprobs"),
        (body(stream_options={"include_usage": True}), "stream_options"),
        (body(messages=[]), "messages"),
        ({"model": "demo"}, "prompt"),
    ],
    ids=str,
)
async def test_unsupported_completion_fields_are_refused_by_name(
    client: httpx.AsyncClient, engine: ScriptedEngine, wrong: dict[str, Any], param: str
) -> None:
    answer = await client.post(ROUTE, json=wrong)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert engine.submitted == []


async def test_harmless_fields_of_completions_are_reported(client: httpx.AsyncClient) -> None:
    request = body(user="me", metadata={"a": "b"}, stream=True)
    request["stream_options"] = {"include_obfuscation": True}
    answer = await client.post(ROUTE, json=request)
    named = "metadata, user, stream_options.include_obfuscation"
    assert (answer.status_code, answer.headers["x-vlm-ignored"]) == (200, named)


async def test_completion_stream_has_usage_in_every_chunk(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    def counted(request_id: str) -> Tokens:
        return Tokens((Delta(request_id, "One", usage=Usage(7, 1, 3)),))

    engine.script = (counted, ended(), finished(Usage(7, 2, 3)))
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await client.post(ROUTE, json=body(stream=True, stream_options=options))
    assert engine.submitted[0].sampling.reports_usage
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:7] == "data: {"]
    totals = [chunk["usage"] and chunk["usage"]["total_tokens"] for chunk in chunks]
    assert totals == [8, None, 9]


def test_neutral_completion_fields_are_not_in_schema() -> None:
    assert not NEUTRAL.keys() & {field.name for field in structs.fields(CompletionRequest)}


async def test_text_completion_has_its_fields(client: httpx.AsyncClient) -> None:
    answer = (await client.post(ROUTE, json=body())).json()
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 0
    assert answer == {
        "object": "text_completion",
        "model": "demo",
        "choices": [{"text": "Hello world", "index": 0, "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 2,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 3},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        },
    }


def entry(token: str, logprob: float, *top: tuple[str, float]) -> TokenLogprob:
    return TokenLogprob(
        TokenText(token, logprob), tuple(TokenText(*alternative) for alternative in top)
    )


async def test_completion_log_probabilities_have_legacy_shape(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (
        scored("Hi", entry("Hi", -0.5, ("Hi", -0.5), ("Ho", -1.0))),
        scored(" you", entry(" you", float("-inf"), (" you", -2.0))),
        ended(),
        finished(),
    )
    answer = (await client.post(ROUTE, json=body(logprobs=2))).json()
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["Hi", " you"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"Hi": -0.5, "Ho": -1.0}, {" you": -2.0}],
        "text_offset": [0, 2],
    }
    answer = await client.post(ROUTE, json=body(logprobs=2, stream=True))
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:7] == "data: {"]
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [logprobs["text_offset"] for logprobs in found if logprobs] == [[0], [2]]


async def test_openai_client_completes_and_streams_text(engine: ScriptedEngine) -> None:
    engine.script = (
        text("One"),
        text("Two", choice=1),
        ended("length"),
        ended(choice=1),
        finished(),
    )
    async with listening(engine) as port:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        whole = await client.completions.create(model="demo", prompt="Count", n=2)
        assert [(c.text, c.finish_reason) for c in whole.choices] == [
            ("One", "length"),
            ("Two", "stop"),
        ]
        stream = await client.completions.create(
            model="demo", prompt="Count", n=2, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        await client.close()
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["One", "Two"]
    assert [c.usage.total_tokens for c in chunks if c.usage] == [9]


async def test_completion_stream_error_ends_without_done(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (text("One"), failed("engine_died", "It died."))
    answer = await client.post(ROUTE, json=body(stream=True))
    assert '"code":"engine_died"' in answer.text
    assert "[DONE]" not in answer.text
