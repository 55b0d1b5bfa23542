"""What two daemons behind the gateway give over one, on Linux, each on cores of its own.

Clients have conversations about a picture, turn after turn without a pause, through a gateway with
one daemon on one core, one with two daemons on a core each, and one with one daemon on both cores,
in turns. Clients and gateways run on all cores. Prints JSON: of each, over the rounds, answered
requests per second and the median time to the first token (median, least, most); and how many
requests each of the two daemons got.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from scripts.scale_out import ScaleOut, find_gateway, free_port, gateway_command, get

_HOST = "127.0.0.1"
_WORKER = "x-smg-routed-worker-id"
_MODEL = "demo"
_WORDS = ("the", "house", "a", "tree", "big", "red", "small", "green", "and", "is", "under", "it")
_PLACES = {"one, one core": ((0,),), "two, a core each": ((0,), (1,)), "one, two cores": ((0, 1),)}
"""The cores of each daemon."""


@dataclass
class Round:
    """What was measured of one: its requests, by who answered, and their times in seconds."""

    seconds: float = 0.0
    first_tokens: list[float] = field(default_factory=list)
    workers: Counter[str] = field(default_factory=Counter)


def main() -> None:
    parser = argparse.ArgumentParser(prog="measure_scale", description=__doc__)
    parser.add_argument("model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=8, help="at once")
    parser.add_argument("--conversations", type=int, default=16, help="of each round")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24, help="of each answer")
    parser.add_argument("--words", type=int, default=40, help="of each question")
    parser.add_argument("--side", type=int, default=224, help="of a picture, in pixels")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        started = ScaleOut(Path(folder))
        try:
            urls = {
                place: _start(started, wanted.model, place, cores)
                for place, cores in _PLACES.items()
            }
            print(json.dumps(_measure(wanted, urls), indent=1))
        finally:
            started.end()


def _start(started: ScaleOut, model: Path, place: str, cores: Sequence[Sequence[int]]) -> str:
    """Start daemons and a gateway. Returns its address, once it takes requests."""
    workers = [_daemon(started, model, f"{place} {i}", own) for i, own in enumerate(cores)]
    program = find_gateway()
    if program is None:
        raise SystemExit("the gateway is not installed: pip install 'vlm-server[scale]'")
    port = free_port()
    started.start(place, gateway_command(program, port, free_port(), workers, _MODEL))
    url = f"http://{_HOST}:{port}"

    def is_ready() -> bool:
        told = get(f"{url}/readiness")
        return told is not None and told["healthy_workers"] == len(workers)

    started.wait_for(is_ready)
    return url


def _daemon(started: ScaleOut, model: Path, name: str, cores: Sequence[int]) -> str:
    """Start one on these cores, with as many threads for matrices. Returns its address."""
    port = free_port()
    command = ["taskset", "--cpu-list", ",".join(map(str, cores))]
    command += [sys.executable, "-m", "vlm_server.cli", "serve", "--model", str(model)]
    command += ["--host", _HOST, "--port", str(port), "--stop-at-eof"]
    command += ["--set", f"model.name={_MODEL}", "--set", "memory.limit_bytes=3000000000"]
    threads = str(len(cores))
    started.start(name, command, OPENBLAS_NUM_THREADS=threads, OMP_NUM_THREADS=threads)
    url = f"http://{_HOST}:{port}"
    started.wait_for(lambda: get(f"{url}/health/ready"))
    return url


def _measure(wanted: argparse.Namespace, urls: dict[str, str]) -> dict[str, Any]:
    found: dict[str, list[Round]] = {place: [] for place in urls}
    seed = random.SystemRandom().randrange(1 << 30)
    for number in range(wanted.rounds + 1):
        for turn in range(len(urls)):
            place = list(urls)[(number + turn) % len(urls)]
            seed += wanted.conversations
            measured = _round(wanted, urls[place], seed, is_warm_up=not number)
            if number:
                found[place].append(measured)
    return {place: _summary(rounds) for place, rounds in found.items()}


def _round(wanted: argparse.Namespace, url: str, seed: int, *, is_warm_up: bool) -> Round:
    """All conversations, a number of them at once."""
    measured, begun = Round(), time.perf_counter()
    seeds = range(seed, seed + (wanted.clients if is_warm_up else wanted.conversations))
    with ThreadPoolExecutor(wanted.clients) as threads:
        list(threads.map(lambda each: _converse(wanted, url, each, measured), seeds))
    measured.seconds = time.perf_counter() - begun
    return measured


def _converse(wanted: argparse.Namespace, url: str, seed: int, measured: Round) -> None:
    words = random.Random(seed)
    pixels = np.random.default_rng(seed).integers(0, 255, (wanted.side,) * 2 + (3,), np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    picture = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": picture}}]
    messages: list[dict[str, Any]] = []
    with httpx.Client(headers={"X-SMG-Routing-Key": f"conversation {seed}"}) as client:
        for _ in range(wanted.turns):
            question = " ".join(words.choices(_WORDS, k=wanted.words))
            messages.append({"role": "user", "content": [*content, _text(question)]})
            answer = _ask(client, url, messages, wanted.tokens, measured)
            messages.append({"role": "assistant", "content": answer})
            content = []


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _ask(
    client: httpx.Client, url: str, messages: list[dict[str, Any]], tokens: int, measured: Round
) -> str:
    body = {
        "model": _MODEL,
        "messages": messages,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    begun, text = time.perf_counter(), ""
    with client.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=300) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            choices = json.loads(line.removeprefix("data: "))["choices"]
            piece = "".join(each["delta"].get("content") or "" for each in choices)
            if piece and not text:
                measured.first_tokens.append(time.perf_counter() - begun)
            text += piece
        measured.workers[answer.headers[_WORKER]] += 1
    return text


def _summary(rounds: list[Round]) -> dict[str, Any]:
    rates = [each.workers.total() / each.seconds for each in rounds]
    firsts = [statistics.median(each.first_tokens) for each in rounds]
    return {
        "requests_per_second": _spread(rates),
        "first_token_seconds": _spread(firsts),
        "requests_by_daemon": [sorted(each.workers.values()) for each in rounds],
    }


def _spread(found: list[float]) -> list[float]:
    return [round(each, 3) for each in (statistics.median(found), min(found), max(found))]


if __name__ == "__main__":
    main()
