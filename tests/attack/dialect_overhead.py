"""The overhead of HTTP in each dialect: the time of an answer that the engine gives at once.

By hand: `python -m tests.attack.dialect_overhead --rounds 3` measures a front in its own process,
with the scripted worker, over one connection. A figure lasts from before the request is sent until
its answer is read, so it includes this client, the way to the engine and back, and the worker's
decoding of the request."""

from __future__ import annotations

import argparse
import asyncio
import base64
import http.client
import json
import multiprocessing
import os
import random
import socket
import statistics
import time
from collections.abc import Callable
from io import BytesIO
from multiprocessing.connection import Connection
from typing import Any

from PIL import Image

from tests.support.scripted_daemon import ScriptedSupervisor
from tests.unit.api.scripted_engine import OneModel
from vlm_server.api.app import create_app
from vlm_server.api.http.connection.server import HttpServer
from vlm_server.api.parsing import body_parser
from vlm_server.platform import heap
from vlm_server.settings import EngineSettings, Settings

SCRIPT = "accept prefill token finish"
IMAGE_SIDE_PIXELS = 830
"""Of noise in three channels, which is 2 MB as PNG."""
TEXT_BAR_MS, IMAGE_BAR_MS = 2.0, 5.0


def noise() -> str:
    """An image of 2 MB in base64."""
    pixels = random.Random(0).randbytes(3 * IMAGE_SIDE_PIXELS**2)
    image = Image.frombytes("RGB", (IMAGE_SIDE_PIXELS, IMAGE_SIDE_PIXELS), pixels)
    out = BytesIO()
    image.save(out, "PNG", compress_level=1)
    return base64.b64encode(out.getvalue()).decode()


def openai_parts(image_base64: str | None) -> list[dict[str, Any]]:
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image_base64}"}}
    return [*([url] if image_base64 else ()), {"type": "text", "text": SCRIPT}]


def anthropic_parts(image_base64: str | None) -> list[dict[str, Any]]:
    source = {"type": "base64", "media_type": "image/png", "data": image_base64}
    image = {"type": "image", "source": source}
    return [*([image] if image_base64 else ()), {"type": "text", "text": SCRIPT}]


def responses_parts(image_base64: str | None) -> list[dict[str, Any]]:
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{image_base64}"}
    return [*([image] if image_base64 else ()), {"type": "input_text", "text": SCRIPT}]


def user(content: Any, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **fields}]


def images(image: str | None) -> dict[str, Any]:
    return {"images": [image]} if image else {}


BODIES: dict[str, Callable[[str | None], dict[str, Any]]] = {
    "/v1/chat/completions": lambda image: {"messages": user(openai_parts(image))},
    "/v1/messages": lambda image: {"messages": user(anthropic_parts(image)), "max_tokens": 9},
    "/v1/responses": lambda image: {"input": user(responses_parts(image)), "store": False},
    "/api/chat": lambda image: {"messages": user(SCRIPT, **images(image))},
    "/api/generate": lambda image: {"prompt": SCRIPT, **images(image)},
}


def serve(ready: Connection) -> None:
    """Run the front until the parent process ends."""
    heap.keep_bodies()
    asyncio.run(_serve(ready))


async def _serve(ready: Connection) -> None:
    settings = Settings(engine=EngineSettings(openblas="off"))
    supervisor = ScriptedSupervisor(settings, lambda _stage, _fraction: None)
    pool = body_parser.start_pool(settings.limits)
    await asyncio.to_thread(pool.warm_up)
    server = HttpServer(create_app(settings, OneModel(supervisor), pool), settings)
    await supervisor.start()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await asyncio.wait_for(supervisor.wait_ready(), 30)
        ready.send(listener.getsockname()[1])
        await asyncio.to_thread(ready.poll, None)
        server.should_exit = server.force_exit = True
        await supervisor.stop()
        await serving
    pool.close()


def ask(connection: http.client.HTTPConnection, route: str, body: bytes) -> float:
    """The milliseconds of an answer."""
    started = time.perf_counter()
    connection.request("POST", route, body, {"content-type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    milliseconds = 1e3 * (time.perf_counter() - started)
    assert answer.status == 200, content[:500]
    return milliseconds


def measure(port: int, rounds: int, num_requests: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    image = noise()
    print(f"picture: {len(image) * 3 // 4} bytes; median and 90th percentile of each round, ms")
    for shown, bar in ((None, TEXT_BAR_MS), (image, IMAGE_BAR_MS)):
        for route, make in BODIES.items():
            body = json.dumps({"model": "default", "stream": False, **make(shown)}).encode()
            found = []
            for _ in range(rounds):
                ask(connection, route, body)
                times = [ask(connection, route, body) for _ in range(num_requests)]
                found.append((statistics.median(times), statistics.quantiles(times, n=10)[-1]))
            figures = "  ".join(f"{middle:6.2f} {slow:6.2f}" for middle, slow in found)
            kind = "picture" if shown else "text"
            typical = statistics.median(middle for middle, _ in found)
            verdict = "" if typical <= bar else f"above {bar}"
            print(f"{route:22} {kind:8} {figures}  {verdict}", flush=True)
    print("load average before and after:", START_LOAD, os.getloadavg())
    connection.close()


START_LOAD = os.getloadavg()


def main(rounds: int, requests: int) -> None:
    ours, fronts = multiprocessing.Pipe()
    front = multiprocessing.get_context("spawn").Process(target=serve, args=(fronts,))
    front.start()
    try:
        measure(ours.recv(), rounds, requests)
    finally:
        ours.send(None)
        front.join(30)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=50)
    main(**vars(parser.parse_args()))
