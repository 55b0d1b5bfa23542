"""Measures what work costs: a real daemon on one core, asked by a client on another one.

Each kind of work alone: pictures by size, prompts by length and by how much of them is cached,
answers by how many are written at a time and after how much. Then some of it again while another
daemon works on the next core.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from scripts.simulation.costs import Costs, fit, misfit
from scripts.simulation.real import client
from scripts.simulation.real.client import Answer, ask, at_once, images, question
from scripts.simulation.real.fleet import RunningFleet, running
from scripts.simulation.real.replay import on_last_core
from scripts.simulation.workload import PIXELS_PER_TOKEN_SIDE

_SIZES = ((112, 112), (224, 168), (280, 224), (364, 280), (448, 336), (560, 420))
_CHUNKS: tuple[tuple[int, int], ...] = (
    (0, 64),
    (0, 256),
    (0, 1024),
    (512, 32),
    (512, 128),
    (512, 512),
    (2048, 32),
)
_CHUNKS += ((2048, 128), (2048, 512), (5000, 128), (5000, 512))
_BATCHES: tuple[tuple[int, int], ...] = (
    (1, 64),
    (2, 64),
    (4, 64),
    (8, 64),
    (16, 64),
    (1, 1024),
    (4, 1024),
    (8, 1024),
)
_BATCHES += ((1, 4096), (4, 4096))
_MERGED = ((2, 512), (4, 512), (4, 1536), (6, 1536))
_OTHERS, _OTHER_TOKENS = 4, 32
_DECODED_TOKENS = 24
_TAIL_REQUESTS = 12
_FIRST_ID, _LAST_ID = 20, 300
"""Of token ids that stand for text in the vocabulary of the models that are measured."""


def measure(model: Path, machine: str, rounds: int) -> Costs:
    """Takes some minutes, and two cores."""
    with running(model, 2, with_gateway=False) as fleet, on_last_core():
        return asyncio.run(_Measurement(fleet, rounds).run(model.name, machine))


class _Measurement:
    def __init__(self, fleet: RunningFleet, rounds: int) -> None:
        self._fleet = fleet
        self._rounds = rounds
        self._random = random.Random(time.time_ns())
        self._misfit: dict[str, float] = {}

    async def run(self, model: str, machine: str) -> Costs:
        first, second = self._fleet.daemons
        async with client.client(first) as http, client.client(second) as other:
            self._http = http
            await self._warm_up()
            head, turns = await self._texts()
            kv, features = await self._sizes()
            request, picture, encode, encoded = await self._pictures()
            prefill, prefilled = await self._prefills()
            decode, join, decoded = await self._answers()
            merge = await self._merges()
            tail = await self._tail()
            async with _busy(other, self._random.randrange(10**6)):
                await asyncio.sleep(1)
                slower = [await again() for again in (encoded, prefilled, decoded)]
        return Costs(
            machine=machine,
            model=model,
            measured=time.strftime("%Y-%m-%d"),
            head_tokens=head,
            first_text_tokens=turns[0],
            turn_text_tokens=turns[1],
            kv_bytes_per_token=kv,
            feature_bytes_per_token=features,
            request=request,
            picture=picture,
            encode=encode,
            prefill=prefill,
            join=join,
            merge=merge,
            tail=tail,
            decode=decode,
            slowdown=round(statistics.fmean(slower), 3),
            misfit=self._misfit,
        )

    # ---- what is measured ----------------------------------------------------------------

    async def _warm_up(self) -> None:
        for size in _SIZES:
            await self._ask_picture(size)
        await ask(self._http, {"prompt": self._ids(1024), "max_tokens": 4})

    async def _texts(self) -> tuple[int, tuple[int, int]]:
        """Tokens: those that all prompts begin with; of a first turn and of a later one."""
        width, height = _SIZES[2]
        pictures = images(self._seed(), 2, width, height)
        tokens = _tokens(width, height)
        first = await ask(self._http, _chat([question(pictures[:1])], 1))
        said = {"role": "assistant", "content": "."}
        messages = [question(pictures[:1]), said, question(pictures[1:])]
        second = await ask(self._http, _chat(messages, 1))
        added = second.prompt_tokens - first.prompt_tokens - tokens - 1
        return first.cached_tokens, (first.prompt_tokens - tokens, added)

    async def _sizes(self) -> tuple[float, float]:
        """Bytes of a token's KV and of a picture token's features."""
        before = await self._caches()
        answer = await self._ask_picture(_SIZES[-1])
        after = await self._caches()
        tokens = answer.prompt_tokens - answer.cached_tokens + 1
        kv = (after["prefix"] - before["prefix"]) / tokens
        return kv, (after["encoder"] - before["encoder"]) / _tokens(*_SIZES[-1])

    async def _pictures(self) -> tuple[Any, Any, Any, Callable[[], Awaitable[float]]]:
        """New pictures of each size, then conversations of known ones."""
        encodes, prepares, rests = [], [], []
        for size in _SIZES:
            for _ in range(self._rounds):
                answer = await self._ask_picture(size)
                timing, tokens = answer.timing, _tokens(*size)
                encodes.append((tokens, timing["encode"]))
                prepares.append((tokens, timing["prepare"]))
        known = []
        for number in (1, 4, 10):
            urls = images(self._seed(), number, *_SIZES[0])
            for repeat in range(self._rounds + 1):
                answer = await ask(self._http, _chat([question(urls)], 1), stream=False)
                timing = answer.timing
                rest = answer.seconds - timing["encode"] - timing["prefill"]
                if repeat:
                    rests.append((number, answer.prompt_tokens, rest))
                    known.append((number, timing["prepare"]))
        for number in (64, 1024, 4096):
            ids = self._ids(number)
            for repeat in range(self._rounds + 1):
                answer = await ask(self._http, {"prompt": ids, "max_tokens": 1}, stream=False)
                if repeat:
                    rests.append((0, number, answer.seconds - answer.timing["prefill"]))
        request = self._fit("request", [(1, tokens, n) for n, tokens, _ in rests], _last(rests))
        least = statistics.median(seconds for number, seconds in known if number == 1)
        new = [(tokens, max(1e-4, seconds - least)) for tokens, seconds in prepares]
        picture = self._fit("picture", [(1, tokens) for tokens, _ in new], _last(new))
        shape = [(1, tokens, tokens * tokens) for tokens, _ in encodes]
        encode = self._fit("encode", shape, _last(encodes))
        size = _SIZES[4]
        alone = statistics.median(t for tokens, t in encodes if tokens == _tokens(*size))

        async def again() -> float:
            answers = [await self._ask_picture(size) for _ in range(self._rounds)]
            return statistics.median(one.timing["encode"] for one in answers) / alone

        return request, picture, encode, again

    async def _prefills(self) -> tuple[Any, Callable[[], Awaitable[float]]]:
        """Prompts of which nothing is cached, or all but their ends."""
        found = list[tuple[int, int, float]]()
        known = {before: self._ids(before) for before, _ in _CHUNKS if before}
        for ids in known.values():
            await ask(self._http, {"prompt": ids, "max_tokens": 1})
        for before, new in _CHUNKS:
            ids = known.get(before, [])
            found += [(before, new, await self._prefill(ids, new)) for _ in range(self._rounds)]
        shape = [(1, n, n * (m + n / 2), m) for m, n, _ in found]
        prefill = self._fit("prefill", shape, _last(found))
        alone = statistics.median(t for m, n, t in found if (m, n) == (512, 512))

        async def again() -> float:
            seconds = [await self._prefill(known[512], 512) for _ in range(self._rounds)]
            return statistics.median(seconds) / alone

        return prefill, again

    async def _prefill(self, known: list[int], new: int) -> float:
        body = {"prompt": known + self._ids(new), "max_tokens": 1}
        answer = await ask(self._http, body, stream=False)
        assert abs(answer.cached_tokens - len(known)) <= 2, (answer.cached_tokens, len(known))
        return answer.timing["prefill"]

    async def _answers(self) -> tuple[Any, Any, Callable[[], Awaitable[float]]]:
        """Several at once after prompts that are known, and one after each of another length."""
        found, joins = list[tuple[int, int, float]](), list[tuple[int, float]]()
        for rows, context in _BATCHES:
            found += [
                (rows, context, await self._steps(rows, context)) for _ in range(self._rounds)
            ]
        for tokens in (64, 512, 2048):
            for _ in range(self._rounds):  # the batch runs one step ahead of what it reports
                body = {"prompt": self._ids(tokens), "max_tokens": _DECODED_TOKENS}
                gaps = [b - a for a, b in pairwise((await ask(self._http, body)).times)]
                joins.append((tokens, max(1e-4, gaps[0] - 2 * statistics.median(gaps[1:]))))
        shape = [(1, n, n * (context + _DECODED_TOKENS / 2)) for n, context, _ in found]
        decode = self._fit("decode", shape, _last(found))
        join = self._fit("join", [(1, tokens) for tokens, _ in joins], _last(joins))
        alone = statistics.median(t for *batch, t in found if batch == [4, 1024])

        async def again() -> float:
            return statistics.median([await self._steps(4, 1024) for _ in range(3)]) / alone

        return decode, join, again

    async def _steps(self, rows: int, context: int) -> float:
        """Seconds of a step in which so many decode: the median of those in which all do."""
        beginning = self._ids(context)
        await ask(self._http, {"prompt": beginning, "max_tokens": 1})
        count = _DECODED_TOKENS + 2 * rows
        bodies = [{"prompt": beginning + self._ids(2), "max_tokens": count} for _ in range(rows)]
        answers = await at_once(self._http, bodies)
        begun = max(one.sent + one.times[0] for one in answers)
        ended = min(one.sent + one.times[-1] for one in answers)
        times = [one.sent + each for one in answers for each in one.times]
        within = [each for each in times if begun < each < ended]
        assert len(within) > 8 * rows, (rows, context, len(within))
        span = max(within) - min(within)
        return span / (len(within) / rows - 1)

    async def _merges(self) -> float:
        """What answers that are written lose to others that join them and leave again.

        It grows with the tokens that they have: that is what is wanted.
        """
        found = []
        for rows, context in _MERGED:
            beginning = self._ids(context)
            await ask(self._http, {"prompt": beginning, "max_tokens": 1})
            for _ in range(self._rounds):
                lost = await self._lost_to_others(rows, beginning)
                found.append((2 * rows * context, lost))
        _, merge = self._fit("merge", [(1, tokens) for tokens, _ in found], _last(found))
        return merge

    async def _lost_to_others(self, rows: int, beginning: list[int]) -> float:
        """Seconds that each of `rows` answers takes longer for one that comes and goes."""
        bodies = [{"prompt": beginning + self._ids(2), "max_tokens": 150} for _ in range(rows)]
        written = asyncio.create_task(at_once(self._http, bodies))
        await asyncio.sleep(0.3 + 0.2 * rows)
        others = [
            await ask(self._http, {"prompt": self._ids(_OTHER_TOKENS), "max_tokens": 2})
            for _ in range(_OTHERS)
        ]
        begun = others[0].sent
        ended = others[-1].sent + others[-1].seconds + 0.1
        lost = []
        for one in await written:
            times = [t for t in (one.sent + each for each in one.times) if t < ended]
            gaps = [b - a for a, b in pairwise(times) if b > begun]
            assert one.sent + one.times[-1] > ended
            lost.append(sum(gaps) - len(gaps) * statistics.median(gaps))
        return statistics.fmean(lost) / _OTHERS

    async def _tail(self) -> float:
        """What the daemon computes of a request beyond the time that its client waits.

        Requests are made one by one; the daemon's processes have used so much more.
        """
        waited, cpu = 0.0, 0.0
        idle = await self._idle_share()
        for _ in range(_TAIL_REQUESTS):
            before, begun = self._cpu_seconds(), time.perf_counter()
            urls = images(self._seed(), 1, *_SIZES[2])
            ready = time.perf_counter()
            answer = await ask(self._http, _chat([question(urls)], 16))
            await asyncio.sleep(0.3)
            ended = time.perf_counter()
            waited += answer.seconds
            cpu += self._cpu_seconds() - before - idle * (ended - begun - (ready - begun) / 2)
        return max(0.0, (cpu - waited) / _TAIL_REQUESTS)

    async def _idle_share(self) -> float:
        """Of a core, that a daemon takes which nobody asks."""
        await asyncio.sleep(1)
        before, begun = self._cpu_seconds(), time.perf_counter()
        await asyncio.sleep(4)
        return (self._cpu_seconds() - before) / (time.perf_counter() - begun)

    # ---- how -----------------------------------------------------------------------------

    def _cpu_seconds(self) -> float:
        return self._fleet.cpu_seconds()["daemon-0"]

    async def _ask_picture(self, size: tuple[int, int]) -> Answer:
        """A new one, with one token for an answer."""
        urls = images(self._seed(), 1, *size)
        return await ask(self._http, _chat([question(urls)], 1), stream=False)

    async def _caches(self) -> dict[str, int]:
        """Bytes by the name of the cache."""
        await asyncio.sleep(1.5)  # the engine tells them once a second
        told = (await self._http.get("/status")).json()
        return {one["name"]: one["size_bytes"] for one in told["engine"]["stats"]["caches"]}

    def _ids(self, number: int) -> list[int]:
        return [self._random.randrange(_FIRST_ID, _LAST_ID) for _ in range(number)]

    def _seed(self) -> int:
        return self._random.randrange(2**31)

    def _fit(
        self, name: str, rows: Sequence[Sequence[float]], seconds: Sequence[float]
    ) -> tuple[float, ...]:
        found = fit(rows, seconds)
        self._misfit[name] = round(misfit(rows, seconds, found), 3)
        return found


@asynccontextmanager
async def _busy(http: httpx.AsyncClient, seed: int) -> Any:
    """Another daemon that always has two requests with a new picture and an answer to write."""

    async def on_and_on(number: int) -> None:
        drawn = random.Random(f"{seed} {number}")
        while True:
            urls = images(drawn.randrange(2**31), 1, *_SIZES[2])
            await ask(http, _chat([question(urls)], 16))

    tasks = [asyncio.create_task(on_and_on(number)) for number in range(2)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def _chat(messages: list[dict[str, Any]], max_tokens: int) -> dict[str, Any]:
    return {"messages": messages, "max_tokens": max_tokens}


def _tokens(width: int, height: int) -> int:
    return (width // PIXELS_PER_TOKEN_SIDE) * (height // PIXELS_PER_TOKEN_SIDE)


def _last(rows: Sequence[tuple[Any, ...]]) -> list[float]:
    return [row[-1] for row in rows]
