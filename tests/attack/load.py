"""A load of many small requests, and their results.

By hand, against a running daemon: `python -m tests.attack.load --port 8000 --seconds 60`"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

CHAT = "/v1/chat/completions"
_numbers = count()


@dataclass(frozen=True)
class Reply:
    status: int
    seconds: float
    ended: float
    """On the clock of `time.perf_counter`."""
    retry_after_seconds: int | None
    body: bytes

    @property
    def code(self) -> str:
        """The code of the error."""
        return str(json.loads(self.body)["error"]["code"])


WARM_UP = 0.2
"""Part of a load that does not count: the first answers take as long as they take."""


@dataclass
class Result:
    """All replies of a load, and its seconds."""

    seconds: float
    started: float = field(default_factory=time.perf_counter)
    replies: list[Reply] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return time.perf_counter() - self.started > self.seconds

    @property
    def goodput(self) -> float:
        """Answers per second during the load."""
        first, last = self.started + WARM_UP * self.seconds, self.started + self.seconds
        ends = [reply.ended for reply in self.replies if reply.status == 200]
        return sum(first <= at <= last for at in ends) / (last - first)

    @property
    def statuses(self) -> Counter[int]:
        return Counter(reply.status for reply in self.replies)

    @property
    def retry_after_seconds(self) -> set[int | None]:
        return {reply.retry_after_seconds for reply in self.replies if reply.status == 429}


def chat_body(max_tokens: int, text: str = "") -> bytes:
    """A request with a unique text and an answer of exactly `max_tokens`."""
    words = text or f"Question {next(_numbers)}: what shape is this?"
    request = {
        "model": "default",
        "messages": [{"role": "user", "content": words}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    return json.dumps(request).encode()


async def send(port: int, method: str, path: str, body: bytes = b"", *headers: str) -> Reply:
    """Send one request on a connection of its own."""
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
        if body:
            head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        writer.write("\r\n".join([*head, "", ""]).encode() + body)
        raw = await reader.read()
    finally:
        writer.close()
    top, _, rest = raw.partition(b"\r\n\r\n")
    line, *lines = top.decode("latin-1").split("\r\n")
    fields = {
        name.lower(): value.strip() for name, _, value in (one.partition(":") for one in lines)
    }
    retry_after = fields.get("retry-after")
    ended = time.perf_counter()
    return Reply(
        int(line.split()[1]),
        ended - started,
        ended,
        None if retry_after is None else int(retry_after),
        rest,
    )


async def at_capacity(
    port: int, seconds: float, clients: int, max_tokens: int, key: str = "none"
) -> Result:
    """`clients` that each send the next request once they have their answer."""
    result = Result(seconds)

    async def go_on_asking() -> None:
        while not result.is_over:
            body = chat_body(max_tokens)
            result.replies.append(await send(port, "POST", CHAT, body, _authorization(key)))

    await asyncio.gather(*(go_on_asking() for _ in range(clients)))
    return result


async def patient(port: int, seconds: float, clients: int, max_tokens: int) -> Result:
    """`clients` that each obey `Retry-After` and send the next request once answered."""
    result = Result(seconds)

    async def go_on_asking() -> None:
        while not result.is_over:
            body = chat_body(max_tokens)
            reply = await send(port, "POST", CHAT, body, _authorization("none"))
            result.replies.append(reply)
            await asyncio.sleep(reply.retry_after_seconds or 0)

    tasks = [asyncio.create_task(go_on_asking()) for _ in range(clients)]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return result


async def at_rate(
    port: int, seconds: float, per_second: float, max_tokens: int, keys: Sequence[str] = ("none",)
) -> Result:
    """Requests at a fixed rate whatever their results; refused ones are not retried.

    Clients without an answer at the end disconnect."""
    result = Result(seconds)
    asking: set[asyncio.Task[None]] = set()

    async def ask(number: int) -> None:
        body, key = chat_body(max_tokens), keys[number % len(keys)]
        result.replies.append(await send(port, "POST", CHAT, body, _authorization(key)))

    for number in range(int(per_second * seconds)):
        due = result.started + number / per_second
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        asking.add(task := asyncio.create_task(ask(number)))
        task.add_done_callback(asking.discard)
    for task in list(asking):
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    return result


def _authorization(key: str) -> str:
    return f"Authorization: Bearer {key}"


async def health(port: int, seconds: float) -> list[float]:
    """The seconds of `/health/live`, several times a second."""
    times, started = [], time.perf_counter()
    while time.perf_counter() - started < seconds:
        reply = await send(port, "GET", "/health/live")
        assert reply.status == 200
        times.append(reply.seconds)
        await asyncio.sleep(0.1)
    return times


async def _measure(
    port: int, seconds: float, rounds: int, clients: int, max_tokens: int, factor: float
) -> None:
    """Measure both loads in turns, so that other work on the machine affects them alike."""
    await at_capacity(port, 3, clients, max_tokens)
    capacity, goodput, with_retries = list[float](), list[float](), list[float]()
    for _ in range(rounds):
        usual = await at_capacity(port, seconds / rounds, clients, max_tokens)
        capacity.append(usual.goodput)
        rate = factor * usual.goodput
        overload, live = await asyncio.gather(
            at_rate(port, seconds / rounds, rate, max_tokens), health(port, seconds / rounds)
        )
        goodput.append(overload.goodput)
        waits = [wait for wait in overload.retry_after_seconds if wait is not None]
        print(
            f"capacity {usual.goodput:.2f} answers/s; {factor:g} x: {overload.goodput:.2f},"
            f" {dict(overload.statuses)}, Retry-After {min(waits)} to {max(waits)} s,"
            f" /health/live at most {max(live):.3f} s",
            flush=True,
        )
        waiting = await patient(port, seconds / rounds, int(factor * clients), max_tokens)
        with_retries.append(waiting.goodput)
        print(f"  {factor:g} x the clients, who come back: {waiting.goodput:.2f}", flush=True)
    print(f"goodput at {factor:g} x: {sum(goodput) / sum(capacity):.1%} of that at capacity")
    print(f"with retries: {sum(with_retries) / sum(capacity):.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--factor", type=float, default=10)
    chosen = parser.parse_args()
    asyncio.run(_measure(**vars(chosen)))
