"""Asks a real daemon, and notes when what arrives; parsed when the answer is complete."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from scripts.simulation.real.fleet import MODEL
from tests.support.screenshots import screenshots

ROUTING_KEY = "X-SMG-Routing-Key"
WORKER = "x-smg-routed-worker-id"
QUESTION = "What is to be clicked next, and why?"


@dataclass(frozen=True)
class Answer:
    """sent: by `time.perf_counter`. times: since then, of each read that brought tokens."""

    text: str
    sent: float
    times: tuple[float, ...]
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    worker: str
    timing: dict[str, float]
    """The phases of `Server-Timing`, in seconds; empty of a stream."""


def client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"{url}/v1",
        timeout=300,
        trust_env=False,
        limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0),
    )


async def ask(
    http: httpx.AsyncClient, body: dict[str, Any], *, key: str = "", stream: bool = True
) -> Answer:
    """An answer of exactly `max_tokens`: a completion if `body` has a prompt, else a chat.

    Raises httpx.HTTPError if there is none.
    """
    route = "/completions" if "prompt" in body else "/chat/completions"
    options = {"stream_options": {"include_usage": True}} if stream else {}
    whole = {"model": MODEL, "temperature": 0, "ignore_eos": True, "stream": stream}
    content = json.dumps(whole | options | body).encode()
    headers = {"Content-Type": "application/json"} | ({ROUTING_KEY: key} if key else {})
    sent = time.perf_counter()
    async with http.stream("POST", route, content=content, headers=headers) as response:
        received = [(time.perf_counter() - sent, data) async for data in response.aiter_raw()]
    seconds = time.perf_counter() - sent
    if response.status_code != 200:
        said = b"".join(data for _, data in received)[:300]
        raise httpx.HTTPError(f"{response.status_code}: {said!r}")
    return _parse(received, sent, seconds, response.headers, stream=stream)


def _parse(
    received: list[tuple[float, bytes]],
    sent: float,
    seconds: float,
    headers: httpx.Headers,
    *,
    stream: bool,
) -> Answer:
    text, times, usage = "", list[float](), dict[str, Any]()
    body = b"".join(data for _, data in received)
    ends, position = list[tuple[int, float]](), 0
    for when, data in received:
        position += len(data)
        ends.append((position, when))
    if stream:
        position = 0
        for line in body.split(b"\n"):
            position += len(line) + 1
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            usage = chunk.get("usage") or usage
            said = "".join(map(_text, chunk["choices"]))
            if said:
                times.append(next(when for end, when in ends if end >= position))
            text += said
    else:
        answer = json.loads(body)
        text, usage = _text(answer["choices"][0]), answer["usage"]
    return Answer(
        text,
        sent,
        tuple(times),
        seconds,
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        headers.get(WORKER, ""),
        _timing(headers.get("server-timing", "")),
    )


def _text(choice: dict[str, Any]) -> str:
    said = choice.get("delta") or choice.get("message") or choice
    return said.get("content") or said.get("text") or ""


def _timing(header: str) -> dict[str, float]:
    parts = (part.strip().partition(";dur=") for part in header.split(",") if part)
    return {name: float(milliseconds) / 1000 for name, _, milliseconds in parts}


def images(seed: int, number: int, width: int, height: int) -> list[str]:
    """Screenshots of a desktop at which somebody works, as data URLs."""
    urls = []
    for image in screenshots(seed, number, width, height):
        data = io.BytesIO()
        image.save(data, "PNG")
        urls.append("data:image/png;base64," + base64.b64encode(data.getvalue()).decode())
    return urls


def question(urls: list[str]) -> dict[str, Any]:
    """What a user says: pictures, and a question about them."""
    pictures = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*pictures, {"type": "text", "text": QUESTION}]}


async def at_once(http: httpx.AsyncClient, bodies: list[dict[str, Any]]) -> list[Answer]:
    return list(await asyncio.gather(*(ask(http, body) for body in bodies)))
