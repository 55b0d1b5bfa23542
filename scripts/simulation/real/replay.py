"""Real clients that ask what a workload says, and note what they get."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import httpx
import msgspec

from scripts.simulation.real.client import Answer, ask, client, images, question
from scripts.simulation.real.fleet import RunningFleet
from scripts.simulation.summary import Asked
from scripts.simulation.workload import Conversation, Workload

_ANSWER = "O"
_ANSWER_BIAS = 100
"""All answers repeat a token that no other one is merged with: so each is in the next prompt what
it was, token by token, and a workload's prompts have the lengths that it says."""


class Replayed(msgspec.Struct, frozen=True):
    """asked: of times since the beginning. client_seconds: of all cores, that clients and the
    gateway used; daemon_seconds: that all daemons used. daemons: their URLs."""

    asked: list[Asked]
    client_seconds: float
    daemon_seconds: float
    daemons: list[str]


def replay(fleet: RunningFleet, workload: Workload) -> Replayed:
    """Ask the fleet's gateway, or its one daemon, which then has its core to itself."""
    with nullcontext() if fleet.url else on_last_core():
        return asyncio.run(_replay(fleet, workload))


async def _replay(fleet: RunningFleet, workload: Workload) -> Replayed:
    url = fleet.url or fleet.daemons[0]
    token = await _token_of_answers(fleet.daemons[0])
    drawn = [_images(workload, user) for user in range(workload.users)]
    for each in fleet.daemons:
        await _warm_up(each, workload)
    before, own = fleet.cpu_seconds(), time.process_time()
    async with client(url) as http:
        users = _Users(http, workload, token, drawn)
        asked = await users.run()
    after, own = fleet.cpu_seconds(), time.process_time() - own
    used = {name: after[name] - before[name] for name in after}
    gateway = used.pop("gateway", 0.0)
    return Replayed(asked, own + gateway, sum(used.values()), fleet.daemons)


class _Users:
    def __init__(
        self,
        http: httpx.AsyncClient,
        workload: Workload,
        token: int,
        drawn: list[dict[str, list[list[str]]]],
    ) -> None:
        self._http = http
        self._workload = workload
        self._bias = {str(token): _ANSWER_BIAS}
        self._drawn = drawn
        self._begun = 0.0
        self._asked: list[Asked] = []

    async def run(self) -> list[Asked]:
        self._begun = time.perf_counter()
        await asyncio.gather(*(self._run(user) for user in range(self._workload.users)))
        return self._asked

    async def _run(self, user: int) -> None:
        for conversation in self._workload.conversations(user):
            messages: list[dict[str, object]] = []
            for turn, seconds in enumerate(conversation.think_seconds):
                await asyncio.sleep(seconds)
                if time.perf_counter() - self._begun >= self._workload.seconds:
                    return
                messages.append(question(self._drawn[user][conversation.key][turn]))
                answer = await self._ask(conversation, turn, messages)
                messages.append({"role": "assistant", "content": answer.text})

    async def _ask(
        self, conversation: Conversation, turn: int, messages: list[dict[str, object]]
    ) -> Answer:
        tokens = self._workload.answer_tokens
        body = {"messages": messages, "max_tokens": tokens, "logit_bias": self._bias}
        answer = await ask(self._http, body, key=conversation.key)
        sent = answer.sent - self._begun
        self._asked.append(
            Asked(
                key=conversation.key,
                turn=turn,
                worker=answer.worker,
                sent=sent,
                ttft=answer.times[0],
                ended=sent + answer.seconds,
                prompt_tokens=answer.prompt_tokens,
                cached_tokens=answer.cached_tokens,
                answer_tokens=tokens,
            )
        )
        return answer


def _images(workload: Workload, user: int) -> dict[str, list[list[str]]]:
    """Of each conversation that the user may have in the time, those of each turn.

    Drawn before the clock runs: clients have a core to share.
    """
    drawn, seconds = dict[str, list[list[str]]](), 0.0
    for conversation in workload.conversations(user):
        if seconds >= workload.seconds:
            return drawn
        number = workload.pictures * workload.turns
        seed = random.Random(conversation.key).randrange(2**31)
        urls = images(seed, number, workload.width, workload.height)
        pictures = workload.pictures
        drawn[conversation.key] = [
            urls[turn * pictures : (turn + 1) * pictures] for turn in range(workload.turns)
        ]
        seconds += sum(conversation.think_seconds)
    return drawn


async def _token_of_answers(url: str) -> int:
    """The id of `_ANSWER`."""
    async with client(url) as http:
        told = await http.post("/tokenize", json={"prompt": _ANSWER})
        (token,) = told.raise_for_status().json()["tokens"]
        return int(token)


async def _warm_up(url: str, workload: Workload) -> None:
    """Each shape once, as a daemon has that was asked before; and the head of prompts."""
    async with client(url) as http:
        for seed in range(2):
            urls = images(10**9 + seed, workload.pictures, workload.width, workload.height)
            await ask(http, {"messages": [question(urls)], "max_tokens": 8})


def mean_client_seconds(replayed: list[Replayed]) -> float:
    """Of a core, for a request."""
    return sum(one.client_seconds for one in replayed) / sum(len(one.asked) for one in replayed)


def assignments(replayed: Replayed) -> Mapping[str, int]:
    """Which worker answered each conversation, by its number."""
    daemons = replayed.daemons
    return {one.key: daemons.index(one.worker) for one in replayed.asked if one.worker}


@contextmanager
def on_last_core() -> Iterator[None]:
    """Within the block, this process runs on the last of its cores alone."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
