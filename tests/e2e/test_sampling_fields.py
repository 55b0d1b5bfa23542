"""Sampling fields and log probabilities, in a real daemon."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.test_chat_api import complete, streamed, text_of
from tests.support.daemons import Daemon
from tests.support.images import noise, user
from tests.support.whole_run import few_of

pytestmark = pytest.mark.e2e

TEXT_ID, TEXT = 340, " text"
END_ID, END = 370, "<|im_end|>"
IMAGE_ID = 374
VOCABULARY_SIZE = 376
FORCED_END = {"logit_bias": {str(END_ID): 100}}


def entries(choice: Any) -> list[Any]:
    assert choice.logprobs is not None
    return list(choice.logprobs.content)


def figures(choice: Any) -> Iterator[tuple[str, float]]:
    """Each token with its log probability."""
    for entry in entries(choice):
        yield from (
            (alternative.token, alternative.logprob) for alternative in (entry, *entry.top_logprobs)
        )


async def drain(stream: openai.AsyncStream[Any]) -> None:
    """Read a stream to its end; close it in any case."""
    async with stream:
        async for _ in stream:
            pass


# ---- bias ----------------------------------------------------------------------------


@pytest.mark.parametrize("token_id", few_of([0, IMAGE_ID, VOCABULARY_SIZE - 1], [IMAGE_ID]))
def test_any_token_of_vocabulary_may_be_forced(tiny_daemon: Daemon, token_id: int) -> None:
    answer = complete(tiny_daemon, logit_bias={str(token_id): 100})
    assert answer.usage.completion_tokens == 24


@pytest.mark.parametrize(
    "token_id", few_of((-1, VOCABULARY_SIZE, 2**31, 9999999999), (VOCABULARY_SIZE,))
)
async def test_logit_bias_on_unknown_token_is_refused_without_side_effects(
    tiny_daemon: Daemon, token_id: int
) -> None:
    pid, alone = tiny_daemon.engine_pid(), text_of(tiny_daemon, max_tokens=200)
    client = tiny_daemon.async_client()
    fields = {"model": "default", "messages": [user("Hello")], "temperature": 0}
    stream = await client.chat.completions.create(**fields, stream=True, max_tokens=200)
    pieces = [(await anext(stream)).choices[0].delta.content or "" for _ in range(3)]
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**fields, logit_bias={"1": 1, str(token_id): 1})
    assert (caught.value.code, caught.value.param) == ("invalid_value", "logit_bias")
    pieces += [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == alone
    assert tiny_daemon.engine_pid() == pid
    tiny_daemon.wait_idle()


# ---- ends ----------------------------------------------------------------------------


def test_end_token_ends_answer(tiny_daemon: Daemon) -> None:
    answer = complete(tiny_daemon, **FORCED_END)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", 1)


def test_min_tokens_delay_end(tiny_daemon: Daemon) -> None:
    answer = complete(tiny_daemon, extra_body={"min_tokens": 5}, **FORCED_END)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", 6)
    answer = complete(tiny_daemon, extra_body={"min_tokens": 24}, **FORCED_END)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 24)


def test_ignored_end_tokens_have_no_text(tiny_daemon: Daemon) -> None:
    answer = complete(tiny_daemon, extra_body={"ignore_eos": True}, **FORCED_END)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 24)
    assert answer.choices[0].message.content == ""


# ---- fields that change an answer ----------------------------------------------------


PENALTIES: list[dict[str, Any]] = [
    {"presence_penalty": 2},
    {"frequency_penalty": 2},
    {"extra_body": {"repetition_penalty": 2}},
    {"extra_body": {"repetition_penalty": 1e-30}},
]


@pytest.mark.parametrize("fields", few_of(PENALTIES, PENALTIES[1:3]))
def test_penalties_change_answer_reproducibly(tiny_daemon: Daemon, fields: dict[str, Any]) -> None:
    changed = text_of(tiny_daemon, max_tokens=100, **fields)
    assert changed != text_of(tiny_daemon, max_tokens=100)
    assert changed == text_of(tiny_daemon, max_tokens=100, **fields)


@pytest.mark.parametrize("extra", [{"top_k": 1}, {"min_p": 1}])
def test_top_k_of_one_samples_greedily(tiny_daemon: Daemon, extra: dict[str, Any]) -> None:
    assert text_of(tiny_daemon, temperature=2, extra_body=extra) == text_of(tiny_daemon)


@pytest.mark.parametrize("top_k", few_of([0, -1, 2**31 - 1], [-1]))
def test_every_token_may_be_sampled_without_top_k(tiny_daemon: Daemon, top_k: int) -> None:
    plain = text_of(tiny_daemon, temperature=1, seed=3)
    assert text_of(tiny_daemon, temperature=1, seed=3, extra_body={"top_k": top_k}) == plain


# ---- log probabilities ---------------------------------------------------------------


def test_greedy_token_is_likeliest_token(tiny_daemon: Daemon) -> None:
    answer = complete(tiny_daemon, logprobs=True, top_logprobs=20)
    shown = entries(answer.choices[0])
    assert len(shown) == answer.usage.completion_tokens == 24
    for entry in shown:
        top = entry.top_logprobs
        assert len(top) == 20
        assert (entry.token, entry.logprob) == (top[0].token, top[0].logprob)
        assert [alternative.logprob for alternative in top] == sorted(
            (t.logprob for t in top), reverse=True
        )
        assert sum(math.exp(alternative.logprob) for alternative in top) < 1.0001
        assert all(
            bytes(alternative.bytes).decode() == alternative.token for alternative in (entry, *top)
        )


def test_log_probabilities_need_no_alternatives(tiny_daemon: Daemon) -> None:
    answer = complete(tiny_daemon, logprobs=True, temperature=1, seed=1)
    assert len(entries(answer.choices[0])) == 24
    assert all(entry.top_logprobs == [] for entry in entries(answer.choices[0]))
    assert complete(tiny_daemon, logprobs=False).choices[0].logprobs is None
    assert complete(tiny_daemon).choices[0].logprobs is None


def test_log_probabilities_exclude_logit_bias(tiny_daemon: Daemon) -> None:
    fields = {"logprobs": True, "top_logprobs": 5, "max_tokens": 1}
    (plain,) = entries(complete(tiny_daemon, **fields).choices[0])
    (biased,) = entries(complete(tiny_daemon, logit_bias={str(TEXT_ID): 100}, **fields).choices[0])
    assert biased.token == TEXT
    assert biased.logprob < plain.logprob
    assert biased.top_logprobs[0].logprob == pytest.approx(plain.logprob, abs=1e-4)


@pytest.mark.parametrize("fields", [{}, {"stop": "!never!"}, {"temperature": 1.5, "seed": 4}])
def test_stream_has_log_probabilities_of_whole_answer(
    tiny_daemon: Daemon, fields: dict[str, Any]
) -> None:
    fields = {"max_tokens": 100, "logprobs": True, "top_logprobs": 3, **fields}
    whole = complete(tiny_daemon, **fields).choices[0]
    text, chunks = streamed(tiny_daemon, **fields)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert text == whole.message.content
    from_stream = [entry for choice in choices if choice.logprobs for entry in entries(choice)]
    assert from_stream == entries(whole)
    assert len(from_stream) == 100


def test_stream_has_log_probability_of_end_token(tiny_daemon: Daemon) -> None:
    _, chunks = streamed(tiny_daemon, logprobs=True, **FORCED_END)
    from_stream = [
        e for chunk in chunks if chunk.choices[0].logprobs for e in entries(chunk.choices[0])
    ]
    assert [entry.token for entry in from_stream] == [END]


def test_openai_stream_helper_collects_log_probabilities(tiny_daemon: Daemon) -> None:
    """The helper accepts only answers that ended by themselves."""
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "temperature": 0}
    fields |= {"model": "default", "messages": [user("Hello")], "max_tokens": 24}
    fields |= {"extra_body": {"min_tokens": 9}, **FORCED_END}
    whole = tiny_daemon.client().chat.completions.create(**fields)
    with tiny_daemon.client().chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion()
    assert entries(final.choices[0]) == entries(whole.choices[0])
    assert len(entries(final.choices[0])) == 10


async def test_log_probabilities_of_joining_request_are_as_alone(tiny_daemon: Daemon) -> None:
    client = tiny_daemon.async_client()

    async def answer_to(seed: int) -> Any:
        answer = await client.chat.completions.create(
            model="default",
            messages=[user(noise(seed, (96, 96)), "What?" * (seed + 1))],
            temperature=0.8,
            seed=seed,
            max_tokens=20,
            logprobs=True,
            top_logprobs=seed,
        )
        return answer.choices[0]

    alone = [await answer_to(seed) for seed in range(4)]
    stream = await client.chat.completions.create(
        model="default", messages=[user("Hello")], temperature=0, max_tokens=8000, stream=True
    )
    await anext(stream)
    running = asyncio.create_task(drain(stream))
    joined = await asyncio.gather(*map(answer_to, range(4)))
    assert not running.done()
    running.cancel()
    await client.close()
    tiny_daemon.wait_idle()
    for choice, expected in zip(joined, alone, strict=True):
        names, values = zip(*figures(choice), strict=True)
        expected_names, expected_values = zip(*figures(expected), strict=True)
        assert names == expected_names
        assert values == pytest.approx(expected_values, abs=1e-4)
