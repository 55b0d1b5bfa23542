"""Two models of which one fits at a time, under load: who fails, how long a switch takes, and what
memory is left when all are unloaded.

One checkpoint is served under two names, which count as two models. Clients of both ask pictures
and texts, streamed and whole, for some seconds. Needs httpx; prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

_NAMES = ("one", "two")
_CLIENTS = 2
_LOADS = 3
"""Of each model before the memory is looked at: what is read once stays."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="measure_switch", description=__doc__)
    parser.add_argument("model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--port", type=int, default=8750)
    parser.add_argument("--dtype", default="auto", help="as model.dtype")
    wanted = parser.parse_args()
    print(json.dumps(_measure(wanted)))


def _measure(wanted: argparse.Namespace) -> dict[str, Any]:
    model, port = wanted.model.absolute(), wanted.port
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    if wanted.dtype == "float32":
        weights *= 2  # they are kept in half of that
    room = max(256 << 20, weights // 4)
    text = f"[server]\nport = {port}\n[memory]\nmax_bytes = {int(1.5 * (weights + room))}\n"
    text += f"min_model_room_bytes = {room}\n"
    text += "".join(
        f'[models.{name}]\npath = "{model}"\ndtype = "{wanted.dtype}"\n' for name in _NAMES
    )
    with tempfile.TemporaryDirectory() as folder:
        config, log = Path(folder) / "models.toml", Path(folder) / "log"
        config.write_text(text)
        command = [sys.executable, "-m", "vlm_server.cli", "serve", "--config", str(config)]
        with log.open("wb") as output:
            daemon = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            found = asyncio.run(_try(daemon.pid, port, wanted.seconds))
            return {"weight_bytes": weights, **found, **_loads(log)}
        finally:
            daemon.terminate()
            daemon.wait(60)


async def _try(pid: int, port: int, seconds: float) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
        await _until_up(client)
        return {**await _memory(client, pid), **await _load(client, seconds)}


async def _until_up(client: httpx.AsyncClient) -> None:
    for _ in range(600):
        try:
            await client.get("/health/live")
        except httpx.TransportError:
            await asyncio.sleep(0.1)
        else:
            return
    raise TimeoutError("the daemon does not come up")


async def _memory(client: httpx.AsyncClient, pid: int) -> dict[str, Any]:
    """Before a load and after the unload, in bytes: of all processes, and on a CUDA device."""
    for name in _NAMES * _LOADS:
        await _ask(client, name, 0, stream=False)
        await client.post("/v1/models/unload", json={"model": name})
    before = _footprint(pid), _device_bytes()
    await _ask(client, _NAMES[0], 0, stream=False)
    loaded = _footprint(pid), _device_bytes()
    await client.post("/v1/models/unload", json={"model": _NAMES[0]})
    after = _footprint(pid), _device_bytes()
    await client.post("/v1/caches/clear", json={})
    return {
        "host_bytes": {"before": before[0], "loaded": loaded[0], "after": after[0]},
        "device_bytes": {"before": before[1], "loaded": loaded[1], "after": after[1]},
    }


async def _load(client: httpx.AsyncClient, seconds: float) -> dict[str, Any]:
    until = time.monotonic() + seconds
    times = list[float]()
    failures = list[str]()

    async def agent(name: str, number: int) -> None:
        turn = 0
        while time.monotonic() < until:
            started = time.monotonic()
            try:
                await _ask(client, name, turn, stream=bool((turn + number) % 2))
                times.append(time.monotonic() - started)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is counted
                failures.append(f"{type(error).__name__}: {error}"[:200])
            turn += 1

    await asyncio.gather(*(agent(name, number) for name in _NAMES for number in range(_CLIENTS)))
    times.sort()
    return {
        "answers": len(times),
        "failures": failures,
        "seconds_median": statistics.median(times),
        "seconds_95": times[int(0.95 * len(times))],
        "seconds_longest": times[-1],
    }


async def _ask(client: httpx.AsyncClient, name: str, seed: int, *, stream: bool) -> None:
    pixels = np.random.default_rng(seed).integers(0, 255, (224, 224, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": f"What is here? {seed}"},
    ]
    body = {
        "model": name,
        "stream": stream,
        "max_tokens": 16,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": content}],
    }
    answer = await client.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    if stream:
        assert answer.text.rstrip().endswith("data: [DONE]"), answer.text[-200:]
        assert '"error"' not in answer.text, answer.text[-200:]
    else:
        assert answer.json()["usage"]["completion_tokens"] == 16
        assert answer.json()["model"] == name


def _loads(log: Path) -> dict[str, Any]:
    lines = log.read_text()
    return {"loads": len(re.findall(r"the engine is ready", lines))}


def _footprint(pid: int) -> int:
    """What the process and all its children hold; pages that several share are counted once."""
    parents = dict[int, int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended
    family, total = {pid}, 0
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    for member in family:
        try:
            rollup = Path(f"/proc/{member}/smaps_rollup").read_text()
        except OSError:
            continue
        total += int(rollup.partition("\nPss:")[2].split()[0]) << 10
    return total


def _device_bytes() -> int:
    """What all programs use of a CUDA device; 0 without one."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(query, capture_output=True, check=True).stdout.split()[0]) << 20
    except (OSError, subprocess.CalledProcessError):
        return 0


if __name__ == "__main__":
    main()
