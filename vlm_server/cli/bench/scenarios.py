"""The scenarios: each sends one round's requests and returns its figures.

Time to first token (TTFT) is from sending a request to its first text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import chain

from vlm_server.cli.bench.figures import (
    Figure,
    Unit,
    equality,
    increase,
    largest,
    mean,
    median,
    milliseconds,
    percentile,
    ratio,
    throughput,
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
from vlm_server.cli.bench.small_mac import small_mac
from vlm_server.cli.client.answer import TimedAnswer
from vlm_server.cli.client.chat import routing_key

Scenario = Callable[[Client, Material], Awaitable[list[Figure]]]

_REPEATS = 24
_REPEAT_PAUSE_SECONDS = 0.02
_TURNS = 8
_MANY_TURNS = 25
_STALL_SECONDS = 0.4
_STALL_IMAGES = 6
_USERS = 8
_STORY_TOKENS = 300
_FORGETFUL_TURNS = 12
_KEPT = 3
_SETTLED = 5
"""Turn from which `_FORGETFUL_TURNS` has whole periods of both forgetful agents."""


async def warm_up(client: Client, material: Material) -> None:
    """Send a text and an image that are not used again, once per server."""
    await client.ask(material.story(), 16)
    await client.ask([user(DESCRIBE, material.image())], 16)


async def repeat(client: Client, material: Material) -> list[Figure]:
    """The same image and question repeated, with a short pause between."""
    messages = [user(DESCRIBE, material.image())]
    answers = []
    for _ in range(_REPEATS):
        answers.append(await client.ask(messages, 16))
        await asyncio.sleep(_REPEAT_PAUSE_SECONDS)
    repeated_ttfts = [answer.ttft for answer in answers[2:]]
    return [
        milliseconds("TTFT, first", answers[0].ttft),
        milliseconds("TTFT, from the third on", median(repeated_ttfts)),
        ratio("slowest / median", largest(repeated_ttfts), median(repeated_ttfts)),
    ]


async def question(client: Client, material: Material) -> list[Figure]:
    """Eight different questions about one image, one after another."""
    image = material.image()
    answers = [await client.ask([user(text, image)], 16) for text in QUESTIONS]
    later = [answer.ttft for answer in answers[1:]]
    return [
        milliseconds("TTFT, first", answers[0].ttft),
        milliseconds("TTFT, from the second on", median(later)),
    ]


async def agent(client: Client, material: Material) -> list[Figure]:
    """A conversation with a new image in every turn."""
    ttfts = [answer.ttft for answer in await _conversation(client, material, _TURNS)]
    return [
        milliseconds("TTFT, turn 1", ttfts[0]),
        milliseconds(f"TTFT, turn {_TURNS}", ttfts[-1]),
        ratio(f"turn {_TURNS} / turn 1", ttfts[-1], ttfts[0]),
    ]


async def long_agent(client: Client, material: Material) -> list[Figure]:
    """The two conversations of 25 turns: the second runs on a warm server."""
    figures = []
    for name in ("first", "second"):
        ttfts = [answer.ttft for answer in await _conversation(client, material, _MANY_TURNS)]
        figures += [
            milliseconds(f"TTFT, {name}, turn 1", ttfts[0]),
            milliseconds(f"TTFT, {name}, turns 2 to {_MANY_TURNS}, median", median(ttfts[1:])),
            milliseconds(f"TTFT, {name}, turn {_MANY_TURNS}", ttfts[-1]),
        ]
    return figures


async def four_agents(client: Client, material: Material) -> list[Figure]:
    """Four concurrent agents."""
    agents = [_conversation(client, material, _TURNS, max_tokens=24) for _ in range(4)]
    ttfts = [answer.ttft for answer in chain.from_iterable(await asyncio.gather(*agents))]
    return [
        milliseconds("TTFT, median", median(ttfts)),
        milliseconds("TTFT, slowest", largest(ttfts)),
    ]


async def forgetful_agent(client: Client, material: Material, max_images: int) -> list[Figure]:
    """A conversation that keeps up to `max_images` images, and then only the latest three."""
    answers = await _conversation(client, material, _FORGETFUL_TURNS, max_images=max_images)
    settled = answers[_SETTLED - 1 :]
    prefilled_again = [
        answer.prompt_tokens - answer.cached_tokens
        if answer.prompt_tokens is not None and answer.cached_tokens is not None
        else None
        for answer in settled
    ]
    return [
        *(
            milliseconds(f"TTFT, turn {turn}", answer.ttft)
            for turn, answer in enumerate(answers, 1)
        ),
        milliseconds(f"TTFT, mean from turn {_SETTLED} on", mean([a.ttft for a in settled])),
        Figure(f"not cached, mean from turn {_SETTLED} on", mean(prefilled_again), Unit.TOKENS),
    ]


async def _conversation(
    client: Client,
    material: Material,
    turns: int,
    *,
    max_tokens: int = 12,
    max_images: int | None = None,
) -> list[TimedAnswer]:
    """The answers in a conversation with a new image in each turn.

    Beyond `max_images`, all but the latest `_KEPT` images are taken out; their words stay. The
    prompt then differs from the first of them on, and is prefilled again from there.
    """
    messages: list[ChatMessage] = [material.system()]
    answers: list[TimedAnswer] = []
    key = ""
    words_by_place: dict[int, str] = {}
    """The words of the messages that still have their image, by their place."""
    for turn in range(1, turns + 1):
        words = words_by_place[len(messages)] = f"Step {turn}: what changed?"
        messages.append(user(words, material.image()))
        if max_images is not None and len(words_by_place) > max_images:
            for place in sorted(words_by_place)[:-_KEPT]:
                messages[place] = user(words_by_place.pop(place))
        key = key or routing_key(messages)
        answers.append(await client.ask(messages, max_tokens, key))
        messages.append(assistant(answers[-1].text))
    return answers


async def stall(client: Client, material: Material) -> list[Figure]:
    """A text stream, and during it six concurrent requests with new images."""
    requests = [[user(DESCRIBE, material.image())] for _ in range(_STALL_IMAGES)]
    story = asyncio.create_task(client.ask(material.story(), _STORY_TOKENS))
    await asyncio.sleep(_STALL_SECONDS)
    was_running = not story.done()
    answers = await asyncio.gather(*(client.ask(messages, 4) for messages in requests))
    text = await story
    silence = largest(text.gaps) if was_running and text.error is None else None
    return [
        milliseconds("longest silence of the text", silence),
        milliseconds("TTFT of the pictures", median(answer.ttft for answer in answers)),
    ]


async def conc(client: Client, material: Material) -> list[Figure]:
    """Eight concurrent users, each with two requests in sequence, every image new."""
    users = [[[user(DESCRIBE, material.image())] for _ in range(2)] for _ in range(_USERS)]

    async def one(requests: list[list[ChatMessage]]) -> list[TimedAnswer]:
        return [await client.ask(messages, 48) for messages in requests]

    clears = await client.num_clears()
    start = time.perf_counter()
    answers = list(chain.from_iterable(await asyncio.gather(*map(one, users))))
    seconds = time.perf_counter() - start
    gaps = [gap for answer in answers for gap in answer.gaps]
    p99 = percentile(gaps, 99)
    return [
        throughput("all users", [answer.completion_tokens for answer in answers], seconds),
        milliseconds("TTFT, median", median(answer.ttft for answer in answers)),
        milliseconds("between tokens, median", median(gaps)),
        milliseconds("between tokens, p99", p99),
        ratio("between tokens, p99 / median", p99, median(gaps)),
        Figure("clears of freed memory", increase(clears, await client.num_clears()), Unit.COUNT),
    ]


async def streams(client: Client, material: Material, counts: tuple[int, ...]) -> list[Figure]:
    """Concurrent text streams, as many as each of `counts` in turn."""
    figures = []
    for count in counts:
        stories = [material.story() for _ in range(count)]
        start = time.perf_counter()
        answers = await asyncio.gather(*(client.ask(story, _STORY_TOKENS) for story in stories))
        seconds = time.perf_counter() - start
        name = f"{count} streams" if count > 1 else "one stream"
        figures.append(throughput(name, [answer.completion_tokens for answer in answers], seconds))
    return figures


async def right(client: Client, material: Material) -> list[Figure]:
    """Two images: in sequence, concurrently, and both in one message in either order."""
    a, b = material.image(), material.image()
    requests = [[user(DESCRIBE, *images)] for images in ((a,), (b,), (a, b), (b, a))]
    alone = [_words(await client.ask(messages, 16)) for messages in requests]
    order = [0, 1, 0, 1, 2, 3]
    several = await asyncio.gather(*(client.ask(requests[i], 16) for i in order[:4]))
    several += await asyncio.gather(*(client.ask(requests[i], 16) for i in order[4:]))
    together = map(_words, several)
    return [
        equality(
            "at once and alone (should be equal)",
            zip((alone[i] for i in order), together, strict=True),
        ),
        equality("A and B (should differ)", [(alone[0], alone[1])]),
        equality("A+B and B+A (should differ)", [(alone[2], alone[3])]),
    ]


def _words(answer: TimedAnswer) -> str | None:
    return answer.text if answer.error is None else None


SCENARIOS: dict[str, Scenario] = {
    "repeat": repeat,
    "question": question,
    "agent": agent,
    "agent-window": partial(forgetful_agent, max_images=_KEPT),
    "agent-drops": partial(forgetful_agent, max_images=2 * _KEPT),
    "stall": stall,
    "conc": conc,
    "text": partial(streams, counts=(1, _USERS)),
    "right": right,
    "streams": partial(streams, counts=(16, 32)),
    "longagent": long_agent,
    "agents4": four_agents,
    "small-mac": small_mac,
}
