"""A conversation stays on its worker, where its prefix is cached; others spread."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.scale.fleet import MODEL, WORKER, Fleet, Gateway
from tests.support.images import noise, user
from vlm_server.cli.client.chat import routing_key
from vlm_server.cli.main import main

pytestmark = pytest.mark.xdist_group("scale")

NUM_CONVERSATIONS = 6
NUM_TURNS = 3
SIZE = (112, 112)


def converse(client: openai.OpenAI, seed: int) -> tuple[int, int, Any]:
    """A conversation about an image: its cached tokens, all its tokens, and its workers."""
    messages: list[Any] = [user(noise(seed, SIZE), "What is this?")]
    key = routing_key(messages)
    cached, tokens, workers = 0, 0, Counter[str]()
    for turn in range(NUM_TURNS):
        response = client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=messages,
            max_tokens=8,
            temperature=0,
            extra_body={"ignore_eos": True},
            extra_headers={"X-SMG-Routing-Key": key},
        )
        answer = response.parse()
        assert response.headers["x-vlm-routing-key"] == key
        workers[response.headers.get(WORKER, "")] += 1
        usage = answer.usage
        cached += usage.prompt_tokens_details.cached_tokens
        tokens += usage.prompt_tokens
        text = answer.choices[0].message.content
        messages += [{"role": "assistant", "content": text}, user(f"And now, {turn}?")]
    return cached, tokens, workers


def test_conversations_stay_on_worker_and_keep_hit_rate(fleet: Fleet) -> None:
    """Compared to the same conversations with one daemon and empty caches: within 5 %."""
    url, daemon = next(iter(fleet.daemons.items()))
    new = range(1000 * fleet.port, 1000 * fleet.port + NUM_CONVERSATIONS)  # known to nobody
    behind = [converse(fleet.client(), seed) for seed in new]
    httpx.post(f"{url}/v1/caches/clear", json={}).raise_for_status()
    alone = [converse(daemon.client(), seed) for seed in new]
    assert [len(workers) for _, _, workers in behind] == [1] * NUM_CONVERSATIONS
    rates = [
        sum(cached for cached, _, _ in conversations)
        / sum(tokens for _, tokens, _ in conversations)
        for conversations in (behind, alone)
    ]
    print(f"hit rates: {rates[0]:.3f} behind {fleet.name}, {rates[1]:.3f} of one daemon")
    assert rates[1] > 0.3  # else there is nothing to compare
    assert rates[0] >= 0.95 * rates[1]


def test_images_spread_over_workers_despite_equal_questions(fleet: Fleet) -> None:
    """One question about 24 images, which `cache_aware` would send to one worker."""
    workers = Counter[str]()
    for seed in range(24):
        messages: list[Any] = [user(noise(seed, (56, 56)), "What is this?")]
        response = fleet.client().chat.completions.with_raw_response.create(
            model="default",  # which the gateway must make the model's name
            messages=messages,
            max_tokens=1,
            extra_headers={"X-SMG-Routing-Key": routing_key(messages)},
        )
        workers[response.headers[WORKER]] += 1
    assert set(workers) == set(fleet.daemons)
    assert min(workers.values()) >= 3


def test_routing_key_of_answer_leads_to_its_worker(fleet: Fleet) -> None:
    """For clients that can't compute a key: they stay on a worker from the second turn."""
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 4}
    messages: list[Any] = [{"role": "user", "content": "Look here."}]
    create = fleet.client().chat.completions.with_raw_response.create
    key = create(messages=messages, **fields).headers["x-vlm-routing-key"]
    workers = set()
    for turn in range(3):
        messages += [{"role": "assistant", "content": "Yes."}, user(f"And {turn}?")]
        response = create(messages=messages, extra_headers={"X-SMG-Routing-Key": key}, **fields)
        workers.add(response.headers[WORKER])
        assert response.headers["x-vlm-routing-key"] == key
    assert len(workers) == 1


def test_ask_command_works_through_gateway(
    gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = tmp_path / "picture.png"
    noise(1, SIZE).save(image)
    words = ["--json", "--max-tokens", "4", str(image), "What is this?"]
    assert main(["ask", "--url", gateway.url, *words]) == 0
    assert json.loads(capsys.readouterr().out)["usage"]["completion_tokens"] <= 4


def test_every_dialect_passes_gateway(gateway: Gateway) -> None:
    """Fields that the gateway adds to a response's request have no effect."""
    response = gateway.client().responses.create(model=MODEL, input="Hi", max_output_tokens=16)
    assert response.usage is not None
    completion = gateway.client().completions.create(model=MODEL, prompt="Hi", max_tokens=2)
    assert completion.usage is not None


def test_new_worker_takes_share_and_others_stay(gateway: Gateway) -> None:
    keys = [f"conversation {i}" for i in range(40)]
    before = {key: gateway.worker_of(key) for key in keys}
    url = gateway.daemons.start()
    try:
        gateway.daemons[url].wait_ready()
        gateway.add_worker(url)
        gateway.wait_for_workers(3)
        after = {key: gateway.worker_of(key) for key in keys}
        moved = {key for key in keys if after[key] != before[key]}
        assert {after[key] for key in moved} == {url}
        assert 3 <= len(moved) <= 28
    finally:
        gateway.remove_worker(url)
        gateway.daemons.stop(url)
        gateway.wait_for_workers(2)
    assert {key: gateway.worker_of(key) for key in keys} == before
