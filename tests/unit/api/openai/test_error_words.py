"""A prompt that is too long is what LangChain and LiteLLM take it for, by the engine's words."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.unit.api.conftest import listening
from tests.unit.api.scripted_engine import ScriptedEngine, failed
from vlm_server.engine.scheduling.limits import SchedulerConfig
from vlm_server.errors import ContextLengthExceeded

CONFIG = SchedulerConfig(1, 64, 1.0, 1, 8192, 1000, frozenset(), 1.0, 1.0)
QUESTION = "word " * 9000


@pytest.fixture
async def base_url(engine: ScriptedEngine) -> AsyncIterator[str]:
    with pytest.raises(ContextLengthExceeded) as caught:
        CONFIG.room_for_answer(9000, 5)
    engine.script = (failed(caught.value.code, caught.value.message, caught.value.param),)
    async with listening(engine) as port:
        yield f"http://127.0.0.1:{port}/v1"


@pytest.mark.parametrize("streams", [False, True])
async def test_langchain_takes_it_for_an_overflow(base_url: str, streams: bool) -> None:
    exceptions = pytest.importorskip("langchain_core.exceptions")
    langchain_openai = pytest.importorskip("langchain_openai")
    model: Any = langchain_openai.ChatOpenAI(
        model="demo", base_url=base_url, api_key="none", max_retries=0
    )
    with pytest.raises(exceptions.ContextOverflowError):
        await (anext(model.astream(QUESTION)) if streams else model.ainvoke(QUESTION))


async def test_litellm_takes_it_for_an_overflow(
    base_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it reads another from the network
    litellm: Any = pytest.importorskip("litellm")
    messages = [{"role": "user", "content": QUESTION}]
    with pytest.raises(litellm.ContextWindowExceededError):
        await litellm.acompletion(
            "openai/demo", messages, base_url=base_url, api_key="none", num_retries=0
        )


async def test_the_official_client_has_the_code(base_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": QUESTION}]
            )
    assert caught.value.code == "context_length_exceeded"
    assert "9000" in caught.value.message
    assert "8192" in caught.value.message
