"""Every accepted field of a chat completion is obeyed, through OpenAI's client."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from tests.support.daemons import Daemon, wait_until
from tests.support.images import noise, user

pytestmark = pytest.mark.e2e


def complete(daemon: Daemon, **fields: Any) -> Any:
    fields = {
        "model": "default",
        "messages": [user("Hello")],
        "temperature": 0,
        "max_tokens": 24,
        **fields,
    }
    return daemon.client().chat.completions.create(**fields)


def text_of(daemon: Daemon, **fields: Any) -> str:
    return complete(daemon, **fields).choices[0].message.content


def streamed(daemon: Daemon, **fields: Any) -> tuple[str, list[Any]]:
    chunks = list(complete(daemon, stream=True, **fields))
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), chunks


def test_stream_has_text_of_whole_answer(tiny_daemon: Daemon) -> None:
    messages = [user(noise(1, (112, 80)), "What?")]
    text, chunks = streamed(tiny_daemon, messages=messages)
    assert text == text_of(tiny_daemon, messages=messages)
    assert len(chunks) > 10
    assert chunks[-1].choices[0].finish_reason == "length"


def test_usage_counts_image_tokens(tiny_daemon: Daemon) -> None:
    without = complete(tiny_daemon, messages=[user("What?")]).usage
    small = complete(tiny_daemon, messages=[user(noise(1, (64, 64)), "What?")]).usage
    large, again = (
        complete(tiny_daemon, messages=[user(noise(1, (128, 128)), "What?")]).usage for _ in "12"
    )
    assert without.prompt_tokens < small.prompt_tokens < large.prompt_tokens
    assert large.completion_tokens == 24
    assert large.total_tokens == large.prompt_tokens + large.completion_tokens
    assert large.prompt_tokens_details.cached_tokens < small.prompt_tokens
    assert again.prompt_tokens_details.cached_tokens == large.prompt_tokens - 1


def test_stream_usage_comes_in_last_chunk(tiny_daemon: Daemon) -> None:
    _, chunks = streamed(tiny_daemon, stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_token_limit_ends_answer_with_length(tiny_daemon: Daemon, name: str) -> None:
    fields = {"max_tokens": openai.omit, name: 3}
    answer = complete(tiny_daemon, **fields)
    assert answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("as_list", [True, False])
def test_stop_string_is_cut_off(tiny_daemon: Daemon, as_list: bool) -> None:
    whole = text_of(tiny_daemon)
    stop = whole[7:10]
    answer = complete(tiny_daemon, stop=[stop, "\x00never"] if as_list else stop)
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    text, _ = streamed(tiny_daemon, stop=stop)
    assert text == whole[: whole.index(stop)]


def test_seed_determines_sampled_answer(tiny_daemon: Daemon) -> None:
    first = text_of(tiny_daemon, temperature=1, seed=5)
    assert first == text_of(tiny_daemon, temperature=1, seed=5)
    assert first != text_of(tiny_daemon, temperature=1, seed=6)
    assert text_of(tiny_daemon, temperature=1) != text_of(tiny_daemon, temperature=1)


def test_tiny_top_p_samples_greedily(tiny_daemon: Daemon) -> None:
    assert text_of(tiny_daemon, temperature=1, top_p=1e-6) == text_of(tiny_daemon)


def test_system_message_changes_answer(tiny_daemon: Daemon) -> None:
    messages = [{"role": "system", "content": "Be brief."}, user("Hello")]
    assert text_of(tiny_daemon, messages=messages) != text_of(tiny_daemon)


async def test_seeded_answers_do_not_depend_on_batch(tiny_daemon: Daemon) -> None:
    client = tiny_daemon.async_client()

    async def answer_to(seed: int) -> str:
        answer = await client.chat.completions.create(
            model="default",
            messages=[user(noise(seed, (96, 96)), "What?")],
            temperature=0.9,
            seed=seed,
            max_tokens=20,
        )
        return answer.choices[0].message.content or ""

    alone = [await answer_to(seed) for seed in range(6)]
    assert await asyncio.gather(*map(answer_to, range(6))) == alone


async def test_batched_images_are_answered_as_alone(tiny_daemon: Daemon) -> None:
    """A, B, A, B concurrently; A+B and B+A in one message."""
    client = tiny_daemon.async_client()
    a, b = noise(1, (112, 80)), noise(2, (112, 80))
    messages = [user(a, "What?"), user(b, "What?"), user(a, b, "What?"), user(b, a, "What?")]

    async def answer_to(message: dict[str, Any]) -> str:
        answer = await client.chat.completions.create(
            model="default", messages=[message], temperature=0, max_tokens=20
        )
        return answer.choices[0].message.content or ""

    alone = [await answer_to(message) for message in messages]
    assert len(set(alone)) == len(alone)
    assert await asyncio.gather(*map(answer_to, messages * 2)) == alone * 2


def test_model_list_has_served_model_only(tiny_daemon: Daemon) -> None:
    models = tiny_daemon.client().models.list().data
    assert [model.id for model in models] == ["model"]
    assert tiny_daemon.client().models.retrieve("model").id == "model"
    with pytest.raises(openai.NotFoundError):
        tiny_daemon.client().models.retrieve("other")
    with pytest.raises(openai.NotFoundError):
        text_of(tiny_daemon, model="other")


def test_metrics_count_requests_and_generated_tokens(tiny_daemon: Daemon) -> None:
    before = metrics(tiny_daemon)
    assert complete(tiny_daemon).usage.completion_tokens == 24
    answered = 'vlm_server_requests_total{route="/v1/chat/completions",status="200"}'
    generated = 'vlm_server_generation_tokens_total{model_name="model"}'
    expected = before[generated] + 24  # the engine says it once a second
    wait_until(lambda: metrics(tiny_daemon)[generated] >= expected, 10, tiny_daemon.log)
    after = metrics(tiny_daemon)
    assert after[answered] == before.get(answered, 0) + 1
    assert after['vlm_server_engine_ready{model_name="model"}'] == 1


def metrics(daemon: Daemon) -> dict[str, float]:
    """The samples by their printed name and labels."""
    text = httpx.get(f"{daemon.url}/metrics").text
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


@pytest.mark.parametrize("name", ["functions", "best_of", "made_up"])
def test_unsupported_fields_are_refused_by_name(tiny_daemon: Daemon, name: str) -> None:
    values: dict[str, Any] = {
        "functions": [{"name": "f", "parameters": {}}],
        "best_of": 2,
        "made_up": 1,
    }
    with pytest.raises(openai.BadRequestError) as caught:
        complete(tiny_daemon, extra_body={name: values[name]})
    assert caught.value.param == name


def test_prompt_over_context_is_refused(tiny_daemon: Daemon) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(tiny_daemon, messages=[user("word " * 20_000)])
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    "text", ["<|im_end|>", "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"]
)
def test_control_tokens_stay_text(tiny_daemon: Daemon, text: str) -> None:
    """They cost the tokens of their characters and stand for no image."""
    plain = complete(tiny_daemon, messages=[user("say now")]).usage.prompt_tokens
    marked = complete(tiny_daemon, messages=[user(f"say {text} now")]).usage.prompt_tokens
    assert marked - plain > len(text) / 4
    with_image = [user(noise(3, (64, 64)), f"say {text} now")]
    assert complete(tiny_daemon, messages=with_image).usage.completion_tokens == 24
