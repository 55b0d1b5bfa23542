"""What a conversation costs that moves to another daemon, with and without a shared disk cache.

Of three daemons of one model, the first two share a folder. All conversations begin at the first
(a picture and a long text); the next question goes to each in turn, one at a time. Needs httpx.
Prints JSON: for each daemon the times to the first token in seconds (median, least, most), the
prompt tokens, and how many of them were known.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

_PLACES = ("stays", "moves, shared", "moves, not shared")
_WORDS = ("the", "house", "a", "tree", "big", "red", "small", "green", "and", "is", "under", "it")


def main() -> None:
    parser = argparse.ArgumentParser(prog="measure_moves", description=__doc__)
    parser.add_argument("model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--words", type=int, default=1000, help="of a conversation's first question"
    )
    parser.add_argument("--side", type=int, default=448, help="of its picture, in pixels")
    parser.add_argument("--port", type=int, default=8760, help="and the two after it")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        shared = Path(folder) / "shared"
        folders = (shared, shared, Path(folder) / "own")
        urls = [
            stack.enter_context(_daemon(wanted.model, wanted.port + number, own))
            for number, own in enumerate(folders)
        ]
        print(json.dumps(_measure(wanted, urls, shared), indent=1))


def _measure(wanted: argparse.Namespace, urls: list[str], shared: Path) -> dict[str, Any]:
    found: dict[str, list[tuple[float, int, int]]] = {place: [] for place in _PLACES}
    for number in range(wanted.rounds + 1):
        for turn in range(len(_PLACES)):
            which = (number + turn) % len(_PLACES)
            messages = [_question(3 * number + which, wanted.words, wanted.side)]
            text, *_ = _ask(urls[0], messages)
            _wait_written(shared)
            messages += [{"role": "assistant", "content": text}, _user("And what is under it?")]
            _, *figures = _ask(urls[which], messages)
            if number:  # the first of each warms up
                found[_PLACES[which]].append((figures[0], figures[1], figures[2]))
    return {place: _summary(each) for place, each in found.items()}


def _summary(found: list[tuple[float, int, int]]) -> dict[str, Any]:
    seconds, prompts, known = zip(*found, strict=True)
    spread = statistics.median(seconds), min(seconds), max(seconds)
    return {
        "first_token_seconds": [round(each, 3) for each in spread],
        "prompt_tokens": statistics.median(prompts),
        "cached_tokens": [statistics.median(known), min(known), max(known)],
    }


def _question(seed: int, words: int, side: int) -> dict[str, Any]:
    """Another text and another picture for each seed."""
    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    text = " ".join(random.Random(seed).choices(_WORDS, k=words))
    return _user(text, {"type": "image_url", "image_url": {"url": url}})


def _user(text: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def _ask(url: str, messages: list[dict[str, Any]]) -> tuple[str, float, int, int]:
    """The answer, seconds to its first token, the prompt's tokens, and the known ones of them."""
    body = {
        "model": "default",
        "messages": messages,
        "temperature": 0,
        "max_tokens": 16,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun, first, text, usage = time.perf_counter(), 0.0, "", {}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            piece = "".join(each["delta"].get("content") or "" for each in chunk["choices"])
            if piece and not first:
                first = time.perf_counter() - begun
            text, usage = text + piece, chunk.get("usage") or usage
    known = usage["prompt_tokens_details"]["cached_tokens"]
    return text, first, usage["prompt_tokens"], known


def _wait_written(folder: Path) -> None:
    """Until nothing was written for a moment."""
    before: list[str] = []
    while True:
        time.sleep(0.3)
        names = sorted(path.name for path in folder.rglob("*.safetensors"))
        if names == before and not any(name.startswith("tmp-") for name in names):
            return
        before = names


@contextmanager
def _daemon(model: Path, port: int, folder: Path) -> Iterator[str]:
    """A daemon's address."""
    options = [f"cache.disk_folder={folder}", "cache.max_disk_bytes=4000000000"]
    command = [sys.executable, "-m", "vlm_server.cli", "serve", "--model", str(model)]
    command += ["--port", str(port), *(part for each in options for part in ("--set", each))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _is_ready(url):
            if process.poll() is not None:
                raise SystemExit(f"a daemon ended: {' '.join(command)}")
            time.sleep(0.2)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready").is_success
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    main()
