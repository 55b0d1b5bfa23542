"""Two long conversations on a small machine: nothing is prefilled twice."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.integration.harness import (
    EngineHarness,
    Turns,
    ask,
    conversation,
    load_model,
    new_preparer,
)
from tests.support.active_memory import active_bytes
from tests.support.integrity import check_integrity
from tests.support.whole_run import few_of
from tests.tiny_models import cached
from vlm_server.interfaces import MemoryReading
from vlm_server.protocol import SamplingParams
from vlm_server.runner.caches import build_caches
from vlm_server.runner.device.device import current_device
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.loading.probe import planned_state_size
from vlm_server.runner.memory import MlxMemory
from vlm_server.settings import CacheSettings, MemorySettings

CONTEXT_TOKENS = 1024
"""In place of 32,768: everything else is in proportion."""
AGENT_TOKENS = CONTEXT_TOKENS * 23_000 // 32_768
TURNS = 10
SHORT = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
MACS = {
    "8 GB, Qwen2-VL 2B": (4.0 - 1.2, 28),
    "16 GB, Qwen3-VL 2B": (9.1 - 1.7, 112),
    "18 GB, Qwen3-VL 2B": (10.2 - 1.7, 112),
}
"""GiB of `memory.max_bytes` that weights of 4 bits leave; KiB of KV per token."""


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """In bfloat16, as on a Mac: 8 bits save less than with float32."""
    folder = cached("qwen2_5_vl", "agent")
    return load_model(folder, max_context_tokens=CONTEXT_TOKENS, dtype="bfloat16")


@pytest.fixture(autouse=True)
def default_limits() -> Iterator[None]:
    yield
    MlxMemory(MemorySettings(), current_device())


def engine_with(loaded: LoadedModel, free_bytes: int, cache: CacheSettings) -> EngineHarness:
    """A warm engine whose weights leave `free_bytes`."""
    baseline = active_bytes()
    caches = build_caches(cache, MemoryReading(baseline, 0, baseline + free_bytes), loaded)
    engine = EngineHarness(loaded, new_preparer(loaded), caches=caches)
    engine.answer(ask("warm up", "word " * 100, sampling=SHORT))
    caches.begin_serving()
    limit_bytes = active_bytes() + free_bytes
    engine.loop.governor.reset_stats()
    engine.loop.governor.set_limit(limit_bytes, 0)
    return engine


def free_bytes_of(loaded: LoadedModel, mac: str) -> int:
    """As many conversations of the whole context as fit on the Mac."""
    free_gib, kv_kib = MACS[mac]
    conversations = free_gib * (1 << 20) / (32_768 * kv_kib)
    size = planned_state_size(loaded.language_model)
    return int(conversations * size.bytes_for(CONTEXT_TOKENS))


class Agent:
    """A conversation that grows to `AGENT_TOKENS` in `TURNS` turns of text."""

    def __init__(self, engine: EngineHarness, name: str) -> None:
        self._engine, self._name = engine, name
        self._rng = random.Random(name)
        self._turns: Turns = (("system", (f"You are {name}. Answer in short words.",)),)
        self._num_turns = 0

    def ask(self) -> str:
        """Add the request of the next turn; returns its name."""
        self._num_turns += 1
        request_id = f"{self._name}, {self._num_turns}"
        words = " ".join(
            self._rng.choices(
                ("red", "left", "blue", "what", "is"), k=round(115 * CONTEXT_TOKENS / 4096)
            )
        )
        self._turns += (("user", (words,)),)
        self._engine.add(conversation(request_id, *self._turns, sampling=SHORT))
        return request_id

    def take_answer(self, request_id: str) -> None:
        self._turns += (("assistant", (self._engine.texts[request_id],)),)


def num_prefilled_again(engine: EngineHarness, *, at_once: bool) -> list[int]:
    """Tokens of the agent's prompt before that each later turn of two agents prefilled."""
    agents, lengths, again = [Agent(engine, name) for name in "AB"], [0, 0], list[int]()
    for _ in range(TURNS):
        asked = []
        for agent in agents:
            asked.append(agent.ask())
            if not at_once:
                engine.run()
        engine.run()
        for number, (agent, request_id) in enumerate(zip(agents, asked, strict=True)):
            agent.take_answer(request_id)
            usage = engine.ends[request_id].usage
            again.append(max(0, lengths[number] - usage.cached_tokens))
            lengths[number] = usage.prompt_tokens
    assert all(0.9 * AGENT_TOKENS <= length <= CONTEXT_TOKENS for length in lengths), lengths
    return again


@pytest.mark.parametrize("at_once", [False, True], ids=["in turns", "at once"])
@pytest.mark.parametrize("mac", few_of(MACS, ["16 GB, Qwen3-VL 2B"]))
def test_two_agents_on_small_mac_prefill_nothing_twice(
    loaded: LoadedModel, mac: str, at_once: bool
):
    engine = engine_with(loaded, free_bytes_of(loaded, mac), CacheSettings(kv_bits="auto"))
    assert engine.caches.kv_storage.bits == 8
    again = num_prefilled_again(engine, at_once=at_once)
    assert max(again) <= 0.01 * AGENT_TOKENS
    check_integrity(engine.caches)


def test_conversation_is_kept_longer_than_features_of_pictures(loaded: LoadedModel):
    """Also with exact KV, one conversation that takes more than a quarter of the memory is kept."""
    free_bytes = free_bytes_of(loaded, "16 GB, Qwen3-VL 2B")
    engine = engine_with(loaded, free_bytes, CacheSettings())
    agent, length, again = Agent(engine, "A"), 0, list[int]()
    for _ in range(TURNS):
        request_id = agent.ask()
        engine.run()
        agent.take_answer(request_id)
        usage = engine.ends[request_id].usage
        again.append(max(0, length - usage.cached_tokens))
        length = usage.prompt_tokens
    assert max(again) <= 0.01 * AGENT_TOKENS
    assert engine.caches.prefixes.stats().size_bytes > free_bytes / 4
