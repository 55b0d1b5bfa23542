"""A watch of a scripted clip with known events: missed and false ones, delays, device time, memory.

The clip is drawn: a circle changes its colour at known frames. Every frame has noise of its own,
and in some a square comes or goes, which changes the picture but not the answer. Now and then the
same question is put to `/v1/decisions` about single frames, for comparison. Prints JSON.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image, ImageDraw

from vlm_server.platform.footprint import footprint_bytes

RGB = {
    "red": (214, 39, 40),
    "green": (20, 150, 60),
    "blue": (31, 80, 200),
    "yellow": (250, 215, 20),
    "black": (10, 10, 10),
}
QUESTION = {
    "instructions": "What colour is the circle?",
    "criteria": sorted(RGB),
    "list_options": False,
}
_SIZE = 448
_SMALL = {"mm_processor_kwargs": {"max_pixels": 224 * 224}}
"""The model is shown small frames: of watch and single requests alike."""
_BASELINE_EVERY, _BASELINE_REQUESTS = 20, 4
"""Events between two looks at single requests, and their number."""


@dataclass(frozen=True)
class Shot:
    """One frame of the clip: its JPEG, the true answer, and whether that has just changed."""

    jpeg: bytes
    colour: str
    is_event: bool


@dataclass
class Seen:
    """What came back: (frame number, answer, time) of each event with an answer, and the end."""

    answers: list[tuple[int, str, float]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)
    watch_id: str = ""
    has_begun: threading.Event = field(default_factory=threading.Event)


def main() -> None:
    parser = argparse.ArgumentParser(prog="measure_watch", description=__doc__)
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--rate", type=float, default=4.0, help="frames a second")
    parser.add_argument("--frames-per-event", type=int, default=15)
    parser.add_argument("--port", type=int, default=8760)
    parser.add_argument("--seed", type=int, default=1)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        port = str(wanted.port)
        command = [sys.executable, "-m", "vlm_server.cli", "serve", "--port", port]
        with log.open("wb") as output:
            daemon = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            print(json.dumps(_measure(wanted, daemon.pid), indent=2))
        finally:
            daemon.terminate()
            daemon.wait()


def clip(num_events: int, frames_per_event: int, seed: int) -> Iterator[Shot]:
    """The first frame is an event, too: the first answer."""
    chance, noise = random.Random(seed), np.random.default_rng(seed)
    colour, has_square = "red", False
    for _ in range(num_events):
        length = chance.randint(frames_per_event // 2, frames_per_event * 3 // 2)
        square_at = chance.randrange(length) if chance.random() < 0.25 else None
        for i in range(length):
            has_square ^= i == square_at
            yield Shot(_jpeg(colour, noise, has_square=has_square), colour, is_event=i == 0)
        colour = chance.choice([each for each in RGB if each != colour])


def _jpeg(colour: str, noise: np.random.Generator, *, has_square: bool) -> bytes:
    picture = Image.new("RGB", (_SIZE, _SIZE), "white")
    draw = ImageDraw.Draw(picture)
    draw.ellipse((60, 120, 260, 320), RGB[colour])
    if has_square:
        draw.rectangle((330, 330, 410, 410), "purple")
    pixels = np.asarray(picture, np.int16) + noise.integers(-6, 7, (_SIZE, _SIZE, 3))
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def _measure(wanted: argparse.Namespace, front_pid: int) -> dict[str, Any]:
    url = f"http://127.0.0.1:{wanted.port}"
    client = httpx.Client(base_url=url, timeout=120, trust_env=False)
    _wait_ready(client)
    pids = front_pid, int(client.get("/v1/status").json()["engine"]["pid"])
    seen = Seen()
    reader = threading.Thread(target=_read, args=(url, seen))
    reader.start()
    seen.has_begun.wait(30)
    sent, truth, sizes = list[float](), list[tuple[int, str]](), list[tuple[int, int]]()
    due, num_single = time.monotonic(), 0
    for number, shot in enumerate(clip(wanted.events, wanted.frames_per_event, wanted.seed), 1):
        if shot.is_event:
            truth.append((number, shot.colour))
            sizes.append(_sizes(client, pids))
            if len(truth) % _BASELINE_EVERY == _BASELINE_EVERY // 2:
                time.sleep(3)  # the watch is idle
                num_single += _ask_singly(client, shot)
                due = time.monotonic()
        time.sleep(max(0.0, due - time.monotonic()))
        due = max(due + 1 / wanted.rate, time.monotonic())
        sent.append(time.monotonic())
        answer = client.post(
            f"/v1/watch/{seen.watch_id}/frames",
            content=shot.jpeg,
            headers={"Content-Type": "image/jpeg"},
        )
        answer.raise_for_status()
    time.sleep(10)
    client.delete(f"/v1/watch/{seen.watch_id}").raise_for_status()
    reader.join(30)
    return _figures(wanted, client, seen, sent, truth, sizes, num_single)


def _sizes(client: httpx.Client, pids: tuple[int, int]) -> tuple[int, int]:
    """Bytes of the front, and of the engine without what its caches hold."""
    stats = client.get("/v1/status").json()["engine"]["stats"]
    cached = sum(cache["size_bytes"] for cache in stats["caches"] if cache["name"] != "disk")
    return footprint_bytes(pids[0]), footprint_bytes(pids[1]) - cached


def _ask_singly(client: httpx.Client, shot: Shot) -> int:
    noise = np.random.default_rng()
    for _ in range(_BASELINE_REQUESTS):
        jpeg = base64.b64encode(_jpeg(shot.colour, noise, has_square=False)).decode()
        images = [f"data:image/jpeg;base64,{jpeg}"]
        body = {"questions": {"q": QUESTION}, "images": images, **_SMALL}
        client.post("/v1/decisions", json=body).raise_for_status()
    return _BASELINE_REQUESTS


def _read(url: str, seen: Seen) -> None:
    body = {"questions": {"q": QUESTION}, **_SMALL}
    with httpx.stream("POST", f"{url}/v1/watch", json=body, timeout=None, trust_env=False) as r:
        for line in r.iter_lines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event["type"] == "started":
                seen.watch_id = event["watch_id"]
                seen.has_begun.set()
            elif event["type"] == "answer":
                frame, answer = event["frame"]["number"], event["answer"]["q"]
                seen.answers.append((frame, answer, time.monotonic()))
            elif event["type"] == "end":
                seen.end = event


def _figures(
    wanted: argparse.Namespace,
    client: httpx.Client,
    seen: Seen,
    sent: list[float],
    truth: list[tuple[int, str]],
    sizes: list[tuple[int, int]],
    num_single: int,
) -> dict[str, Any]:
    ends = [number for number, _ in truth[1:]] + [len(sent) + 1]
    delays, matched, num_missed = list[float](), set[int](), 0
    for (begin, colour), end in zip(truth, ends, strict=True):
        hits = [
            (i, at)
            for i, (frame, answer, at) in enumerate(seen.answers)
            if begin <= frame < end and answer == colour
        ]
        if hits:
            matched.add(hits[0][0])
            delays.append(hits[0][1] - sent[begin - 1])
        else:
            num_missed += 1
    metrics = client.get("/metrics").text
    watch_seconds = _value(metrics, "vlm_server_watch_device_seconds_total")
    single = _value(metrics, 'vlm_server_request_inference_time_seconds_sum{model_name="demo"}')
    per_frame, per_request = watch_seconds / len(sent), single / max(1, num_single)
    quarter = max(1, len(sizes) // 4)
    front, engine = zip(*sizes, strict=True)
    return {
        "events": len(truth),
        "missed": num_missed,
        "false": len(seen.answers) - len(matched),
        "frames": seen.end["frames"],
        "frames_per_second": wanted.rate,
        "delay_seconds": {
            "median": round(statistics.median(delays), 3),
            "p95": round(statistics.quantiles(delays, n=20)[-1], 3),
        },
        "device_seconds_per_question": round(watch_seconds / seen.end["frames"]["asked"], 3),
        "device_seconds_per_single_request": round(per_request, 3),
        "device_seconds_per_hour_at_a_frame_a_second": {
            "watch": round(3600 * per_frame),
            "requests": round(3600 * per_request),
            "share": round(per_frame / per_request, 3),
        },
        "memory_mib": {
            name: {
                "second_quarter": round(
                    statistics.median(values[quarter : 2 * quarter]) / 2**20, 1
                ),
                "last_quarter": round(statistics.median(values[-quarter:]) / 2**20, 1),
            }
            for name, values in (("front", front), ("engine_without_caches", engine))
        },
    }


def _value(metrics: str, name: str) -> float:
    lines = (line for line in metrics.splitlines() if line.startswith(f"{name} "))
    return sum(float(line.split()[-1]) for line in lines)


def _wait_ready(client: httpx.Client) -> None:
    for _ in range(600):
        try:
            if client.get("/health/ready").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise SystemExit("the daemon does not start")


if __name__ == "__main__":
    main()
