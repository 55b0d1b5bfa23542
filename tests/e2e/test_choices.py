"""Several choices through the official client, whole and streamed."""

from __future__ import annotations

import asyncio
from itertools import chain
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.test_chat_api import complete, text_of
from tests.e2e.test_sampling_fields import entries, figures
from tests.support.daemons import Daemon, checkpoint, running_daemon, wait_until
from tests.support.images import noise, user

pytestmark = pytest.mark.e2e

MESSAGES = [user(noise(1, (96, 96)), "What?")]
DRAWN: dict[str, Any] = {"messages": MESSAGES, "temperature": 1.2, "seed": 11, "n": 4}


def choice_texts(answer: Any) -> list[str]:
    assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
    return [choice.message.content for choice in answer.choices]


def test_seeded_choices_of_image_differ_and_repeat(tiny_daemon: Daemon) -> None:
    answer = complete(tiny_daemon, **DRAWN)
    assert len(set(choice_texts(answer))) == 4
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert choice_texts(complete(tiny_daemon, **DRAWN)) == choice_texts(answer)
    single = complete(tiny_daemon, **{**DRAWN, "n": 1})
    assert choice_texts(single) == choice_texts(answer)[:1]
    assert answer.usage.prompt_tokens == single.usage.prompt_tokens
    assert answer.usage.completion_tokens == 4 * single.usage.completion_tokens == 4 * 24


def test_greedy_choices_are_equal(tiny_daemon: Daemon) -> None:
    alone = text_of(tiny_daemon, messages=MESSAGES)
    assert choice_texts(complete(tiny_daemon, messages=MESSAGES, n=8)) == [alone] * 8


@pytest.mark.parametrize("fields", [{}, {"stop": ["e", "th", "t "]}, {"max_tokens": 100}])
def test_stream_has_choices_of_whole_answer(tiny_daemon: Daemon, fields: dict[str, Any]) -> None:
    fields = {**DRAWN, "logprobs": True, "top_logprobs": 1, **fields}
    complete(tiny_daemon, **fields)  # as many tokens of the prompt are cached from now on
    whole = complete(tiny_daemon, **fields)
    stream = complete(tiny_daemon, stream=True, stream_options={"include_usage": True}, **fields)
    *chunks, last = stream
    streamed: dict[int, list[Any]] = {index: [] for index in range(4)}
    for chunk in chunks:
        assert chunk.usage is None
        (choice,) = chunk.choices
        streamed[choice.index].append(choice)
    assert (last.choices, last.usage) == ([], whole.usage)
    for index, (role, *pieces, finish) in streamed.items():
        expected = whole.choices[index]
        assert (role.delta.role, role.delta.content) == ("assistant", "")
        assert "".join(p.delta.content for p in pieces) == expected.message.content
        assert [e for p in pieces for e in (p.logprobs.content or ())] == entries(expected)
        assert {p.finish_reason for p in pieces} <= {None}
        assert (finish.delta.content, finish.finish_reason) == (None, expected.finish_reason)


def test_choices_emit_no_part_of_stop_string(tiny_daemon: Daemon) -> None:
    free = choice_texts(complete(tiny_daemon, **DRAWN, max_tokens=60))
    stops = [free[0][5:9], free[1][7:10], free[2][-4:], "\x00never"]
    stopped = complete(tiny_daemon, **DRAWN, max_tokens=60, stop=stops)
    for choice, whole in zip(stopped.choices, free, strict=True):
        ends = [(whole.find(stop) + len(stop), stop) for stop in stops if stop in whole]
        _, stop = min(ends, default=(0, ""))
        expected = (whole.partition(stop)[0], "stop") if stop else (whole, "length")
        assert (choice.message.content, choice.finish_reason) == expected
    assert [choice.finish_reason for choice in stopped.choices[:3]] == ["stop"] * 3


def test_openai_stream_helper_collects_choices(tiny_daemon: Daemon) -> None:
    """The helper accepts only answers that ended by themselves."""
    fields: dict[str, Any] = {"model": "default", **DRAWN, "max_tokens": 24}
    fields["stop"] = ["e", "a", "o", "i", "t", " "]
    whole = tiny_daemon.client().chat.completions.create(**fields)
    assert {choice.finish_reason for choice in whole.choices} == {"stop"}
    with tiny_daemon.client().chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion()
    assert choice_texts(final) == choice_texts(whole)


async def test_choices_and_log_probabilities_do_not_depend_on_batch(
    tiny_daemon: Daemon,
) -> None:
    client = tiny_daemon.async_client()

    async def answer_to(seed: int, n: int) -> list[Any]:
        fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "max_tokens": 20}
        answer = await client.chat.completions.create(
            model="default", messages=MESSAGES, temperature=1, seed=seed, n=n, **fields
        )
        return list(answer.choices)

    sizes = [3, 1, 8, 5]
    alone = [await answer_to(seed, n) for seed, n in enumerate(sizes)]
    together = await asyncio.gather(*(answer_to(seed, n) for seed, n in enumerate(sizes)))
    for found, expected in zip(chain(*together), chain(*alone), strict=True):
        names, values = zip(*figures(found), strict=True)
        expected_names, expected_values = zip(*figures(expected), strict=True)
        assert names == expected_names
        assert values == pytest.approx(expected_values, abs=1e-4)
    tiny_daemon.wait_idle()


async def test_disconnected_client_ends_all_choices(tiny_daemon: Daemon) -> None:
    client = tiny_daemon.async_client()
    stream = await client.chat.completions.create(
        model="default",
        messages=MESSAGES,
        max_tokens=4000,
        n=8,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    await anext(stream)
    wait_until(lambda: tiny_daemon.status()["engine"]["stats"]["tracked"], 10, tiny_daemon.log)
    await stream.close()
    tiny_daemon.wait_idle()


@pytest.mark.parametrize("n", [0, 9, -1])
def test_wrong_numbers_of_choices_are_refused(tiny_daemon: Daemon, n: int) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(tiny_daemon, n=n)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "n")


@pytest.mark.whole
def test_more_choices_than_engine_has_rows_are_refused(tmp_path: Path) -> None:
    model = str(checkpoint("qwen3_vl"))
    limit = ("--set", "scheduler.max_num_seqs=2")
    with running_daemon(tmp_path, "--model", model, *limit) as small:
        with pytest.raises(openai.BadRequestError) as caught:
            complete(small, n=3)
        assert (caught.value.code, caught.value.param) == ("invalid_value", "n")
        assert "2" in caught.value.message
        assert len(complete(small, n=2).choices) == 2
        small.wait_idle()
