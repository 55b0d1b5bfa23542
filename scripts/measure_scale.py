"""What two daemons behind the gateway give over one, on Linux, each on cores or a GPU of its own.

Clients have conversations about a picture, turn after turn without a pause, through a gateway with
one daemon on one core, one with two daemons on a core each, and one with one daemon on both cores,
in turns; with `--gpus`, one daemon on the first GPU, and two on a GPU each. Clients and gateways
run on all cores. Prints JSON: of each, over the rounds, answered
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
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from scripts.scale_out import ScaleOut, find_gateway, free_port, gateway_command, get

_HOST = "127.0.0.1"
_WORKER = "x-smg-routed-worker-id"
_MODEL = "demo"
_CPU_BYTES, _GPU_BYTES = 3_000_000_000, 30_000_000_000
"""Limits of a daemon's memory; one GPU has two daemons, of which one is idle."""
_SQUARES = 56
"""Squares in a row of a picture."""
_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
_WORDS = ("the", "house", "a", "tree", "big", "red", "small", "green", "and", "is", "under", "it")
_CORES = {"one, one core": ((0,),), "two, a core each": ((0,), (1,)), "one, two cores": ((0, 1),)}
"""The cores of each daemon."""
_GPUS = {"one, one GPU": ((0,),), "two, a GPU each": ((0,), (1,))}
"""The GPU of each daemon."""


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
    parser.add_argument("--gpus", action="store_true", help="two CUDA devices rather than cores")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        started = ScaleOut(Path(folder))
        try:
            urls = {
                place: _start(started, wanted, place, own)
                for place, own in (_GPUS if wanted.gpus else _CORES).items()
            }
            print(json.dumps(_measure(wanted, urls), indent=1))
        finally:
            started.end()


def _start(
    started: ScaleOut, wanted: argparse.Namespace, place: str, devices: Sequence[Sequence[int]]
) -> str:
    """Start daemons and a gateway. Returns its address, once it takes requests."""
    workers = [_daemon(started, wanted, f"{place} {i}", own) for i, own in enumerate(devices)]
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


def _daemon(
    started: ScaleOut, wanted: argparse.Namespace, name: str, devices: Sequence[int]
) -> str:
    """Start one on this GPU, or these cores with as many threads. Returns its address."""
    port = free_port()
    command = [sys.executable, "-m", "vlm_server.cli", "serve", "--model", str(wanted.model)]
    command += ["--host", _HOST, "--port", str(port), "--stop-at-eof"]
    command += ["--set", f"model.name={_MODEL}"]
    if wanted.gpus:
        command += ["--set", f"memory.max_bytes={_GPU_BYTES}"]
        environment = {"CUDA_VISIBLE_DEVICES": str(devices[0])}
    else:
        command += ["--set", f"memory.max_bytes={_CPU_BYTES}"]
        command = ["taskset", "--cpu-list", ",".join(map(str, devices)), *command]
        environment = dict.fromkeys(_THREADS, str(len(devices)))
    started.start(name, command, **environment)
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
    seeds = range(seed, seed + (wanted.clients if is_warm_up else wanted.conversations))
    with ThreadPoolExecutor(wanted.clients) as threads:
        pictures = list(threads.map(lambda each: _picture(wanted.side, each), seeds))
        measured, begun = Round(), time.perf_counter()
        converse = partial(_converse, wanted, url, measured)
        list(threads.map(converse, seeds, pictures))
    measured.seconds = time.perf_counter() - begun
    return measured


def _picture(side: int, seed: int) -> str:
    """A PNG of squares in random colours, as a data URL."""
    pixels = np.random.default_rng(seed).integers(0, 255, (_SQUARES, _SQUARES, 3), np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).resize((side, side), Image.Resampling.NEAREST).save(data, "PNG")
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"


def _converse(
    wanted: argparse.Namespace, url: str, measured: Round, seed: int, picture: str
) -> None:
    words = random.Random(seed)
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
