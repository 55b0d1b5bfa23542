"""The scenario `day`: a day of mixed requests, compressed, and the server's drift over it.

The day consists of rounds. Each has the same requests with new images and words, in an order
that depends on the seed: an agent, a burst of several users, a user with questions, texts; then a
pause. Whole rounds are compared. Drift is the end of the day against its beginning, by kind of
request; the machine's own drift is measured by fixed work.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from PIL import Image

from vlm_server.cli.bench.figures import (
    Figure,
    Unit,
    known_values,
    median,
    milliseconds,
    percent,
    quotient,
)
from vlm_server.cli.bench.material import (
    DESCRIBE,
    QUESTIONS,
    ChatMessage,
    Material,
    assistant,
    user,
)
from vlm_server.cli.bench.servers import Client

NAME = "day"
FIXED_WORK = "fixed work"
"""Name of the work of this process alone, which measures the machine's own speed."""
_FIXED_WORKS = 3
_AGENT_TURNS = 6
_BURST_USERS = 4
_QUESTIONS = 4
_STORIES = 2
_THINK_SECONDS = (0.02, 0.2)
"""Pause between an answer and the same user's next request."""
_IDLE_SECONDS = (1.5, 4.0)
"""Pause after a round, for hours without requests."""
MAX_DRIFT = 0.03
_PARTS = 10


class DaySample(msgspec.Struct, frozen=True):
    """One request of a day, sent `seconds` after its begin; `ttft` is None if it failed.

    Requests of one `kind` have the same size. For `FIXED_WORK`, `ttft` is its duration.
    """

    kind: str
    round: int
    seconds: float
    ttft: float | None


async def spend_day(client: Client, material: Material, seconds: float) -> list[DaySample]:
    """The samples of whole rounds of `seconds` or a little longer, as the answers ended."""
    day = Day(client, material)
    while day.elapsed_seconds < seconds:
        await day.spend_round()
    return day.samples


class Day:
    """The rounds of a day with one server; `samples` are those of the rounds so far."""

    def __init__(self, client: Client, material: Material) -> None:
        self._client = client
        self._material = material
        self._round = 0
        self._image = Image.new("RGB", (2000, 1500))
        self._start = time.perf_counter()
        self.samples: list[DaySample] = []

    @property
    def elapsed_seconds(self) -> float:
        return time.perf_counter() - self._start

    async def spend_round(self) -> None:
        """Send all requests once, then pause."""
        await self._ask("text after idle", self._material.story(), 24)
        works: list[Callable[[], Awaitable[None]]]
        works = [self._agent, self._burst, self._questions, self._stories]
        for work in self._material.shuffled(works):
            await work()
        for _ in range(_FIXED_WORKS):
            self._work()
        self._round += 1
        gc.collect()  # automatic collection is off
        await asyncio.sleep(self._material.seconds(*_IDLE_SECONDS))

    async def _agent(self) -> None:
        messages: list[ChatMessage] = [self._material.system()]
        for turn in range(1, _AGENT_TURNS + 1):
            messages.append(user(f"Step {turn}: what changed?", self._material.image()))
            answer = await self._ask(f"agent, turn {turn}", messages, 12)
            messages.append(assistant(answer))
            await self._think()

    async def _burst(self) -> None:
        conversations = [[user(DESCRIBE, self._material.image())] for _ in range(_BURST_USERS)]
        await asyncio.gather(*(self._ask("burst", messages, 24) for messages in conversations))

    async def _questions(self) -> None:
        image = self._material.image()
        for number, question in enumerate(QUESTIONS[:_QUESTIONS]):
            kind = "known picture" if number else "new picture"
            await self._ask(kind, [user(question, image)], 16)
            await self._think()

    async def _stories(self) -> None:
        for _ in range(_STORIES):
            await self._ask("text", self._material.story(), 48)
            await self._think()

    async def _ask(self, kind: str, messages: list[ChatMessage], max_tokens: int) -> str:
        round_, sent_at = self._round, self.elapsed_seconds
        answer = await self._client.ask(messages, max_tokens)
        self.samples.append(DaySample(kind, round_, sent_at, answer.ttft))
        return answer.text

    def _work(self) -> None:
        """Do the fixed work: scale an image down, while no request is in flight."""
        sent_at, start = self.elapsed_seconds, time.perf_counter()
        self._image.resize((500, 375), Image.Resampling.LANCZOS)
        seconds = time.perf_counter() - start
        self.samples.append(DaySample(FIXED_WORK, self._round, sent_at, seconds))

    async def _think(self) -> None:
        await asyncio.sleep(self._material.seconds(*_THINK_SECONDS))


def figures(samples: Sequence[DaySample]) -> list[Figure]:
    """Drift and whether it is within `MAX_DRIFT`, then each kind's median and drift."""
    by_part = parts(samples)
    of_server = levels(samples, kinds(samples))

    def drift(kind: str) -> float | None:
        if len(by_part) < 2:
            return None
        return quotient(median_ttft(kind, by_part[-1]), median_ttft(kind, by_part[0]))

    change = quotient(of_server[-1], of_server[0]) if len(of_server) > 1 else None
    is_within = None if change is None else float(abs(change - 1) <= MAX_DRIFT)
    spread_of_machine = _spread(levels(samples, [FIXED_WORK]))
    all_figures = [
        percent("TTFT, last tenth against the first", change),
        Figure(f"within {MAX_DRIFT:.0%}", is_within, Unit.MET),
        percent("slowest tenth against the fastest", _spread(of_server)),
        milliseconds(FIXED_WORK, median_ttft(FIXED_WORK, samples)),
        percent(f"{FIXED_WORK}: last tenth", drift(FIXED_WORK)),
        percent(f"{FIXED_WORK}: slowest tenth against the fastest", spread_of_machine),
    ]
    for kind in kinds(samples):
        all_figures.append(milliseconds(f"{kind}: TTFT", median_ttft(kind, samples)))
        all_figures.append(percent(f"{kind}: last tenth", drift(kind)))
    return all_figures


def parts(samples: Sequence[DaySample]) -> list[list[DaySample]]:
    """Up to ten parts of the day, as equal as possible in whole rounds."""
    num_rounds = max((sample.round for sample in samples), default=-1) + 1
    num_parts = min(_PARTS, num_rounds)
    day_parts: list[list[DaySample]] = [[] for _ in range(num_parts)]
    for sample in samples:
        day_parts[sample.round * num_parts // num_rounds].append(sample)
    return day_parts


def kinds(samples: Sequence[DaySample]) -> list[str]:
    """The kinds of request, without the fixed work."""
    return sorted({sample.kind for sample in samples} - {FIXED_WORK})


def median_ttft(kind: str, samples: Sequence[DaySample]) -> float | None:
    """Median TTFT of one kind."""
    return median(sample.ttft for sample in samples if sample.kind == kind)


def levels(samples: Sequence[DaySample], kinds: Sequence[str]) -> list[float | None]:
    """The slowness of each part of the day, 1.0 being normal: median over `kinds` of the median
    TTFT in the part, divided by that of the whole day. For `FIXED_WORK`, the machine's slowness.
    """
    day_ttfts = {kind: median_ttft(kind, samples) for kind in kinds}
    return [
        median(quotient(median_ttft(kind, part), day_ttfts[kind]) for kind in kinds)
        for part in parts(samples)
    ]


def _spread(values: Sequence[float | None]) -> float | None:
    ttfts = known_values(values)
    return quotient(max(ttfts), min(ttfts)) if len(ttfts) > 1 else None
