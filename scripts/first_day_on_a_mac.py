"""Tries on a Mac what was proven without one, and prints a report.

Each of the points of docs/macos.md is a function here, which returns what it found, or raises
`Wrong`. Elsewhere than on a Mac, those that need one say so.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import mlx.core as mx
from PIL import Image

from vlm_server.platform import machine
from vlm_server.platform.footprint import footprint_bytes
from vlm_server.runner.backends.metal import MetalAttention
from vlm_server.runner.device.device import Device, DeviceKind, current_device

_SCHEMA = {
    "type": "object",
    "properties": {"shape": {"enum": ["circle", "square", "triangle"]}},
    "required": ["shape"],
    "additionalProperties": False,
}
_MIB = 1 << 20


class Wrong(Exception):
    """Something is not as it should be."""


class NeedsAMac(Exception):
    """Only a Mac can show this."""


@dataclass
class Ground:
    """What the points are tried on."""

    device: Device
    settings: list[str]
    url: str = ""
    pid: int = 0
    pictures: Iterator[int] = field(default_factory=lambda: iter(range(1 << 30)))

    @property
    def is_mac(self) -> bool:
        return sys.platform == "darwin"

    def needs_a_mac(self) -> None:
        if not self.is_mac:
            raise NeedsAMac

    def ask(self, text: str = "What is this?", *, side: int = 256, **options: Any) -> str:
        """An answer about a picture that nobody has seen."""
        body = self.body(text, side, **options)
        made = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=300)
        if made.status_code != 200:
            raise Wrong(f"{made.status_code}: {made.text[:200]}")
        return str(made.json()["choices"][0]["message"]["content"])

    def body(self, text: str, side: int, **options: Any) -> dict[str, Any]:
        number = next(self.pictures)
        shown = Image.new("RGB", (side, side), (number * 37 % 256, number * 11 % 256, 90))
        file = BytesIO()
        shown.save(file, "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        picture = {"type": "image_url", "image_url": {"url": url}}
        content = [picture, {"type": "text", "text": text}]
        message = {"role": "user", "content": content}
        return {"messages": [message], "max_tokens": 32, "temperature": 0, **options}


# ---- the points ----------------------------------------------------------------------------


def service(ground: Ground) -> str:
    """1, 9: launchd starts the service by its socket, and after a crash."""
    ground.needs_a_mac()
    if _command("service", "status").returncode != 4:
        return "not tried: a service is installed already"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = time.monotonic()
    made = _command("service", "install", "--set", f"server.port={port}", *ground.settings)
    try:
        if made.returncode:
            raise Wrong(made.stdout[-500:] + made.stderr[-500:])
        took = time.monotonic() - started
        status = json.loads(_command("service", "status", "--json").stdout)
        os.kill(int(status["pid"]), 9)
        answer = httpx.get(f"http://127.0.0.1:{port}/health", timeout=120)
        return f"answered after {took:.0f} s; after a kill: {answer.status_code}"
    finally:
        _command("service", "uninstall")


def passed_sockets(ground: Ground) -> str:
    """2: schemas and grammars, of which sockets are passed between processes."""
    schema = {"name": "s", "schema": _SCHEMA, "strict": True}
    wanted = {"response_format": {"type": "json_schema", "json_schema": schema}}
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: ground.ask(side=64, **wanted), range(64)))
    if any(json.loads(one).keys() != {"shape"} for one in made):
        raise Wrong("an answer that is not of the schema")
    return "64 answers by a schema, 8 at once"


def late_errors(ground: Ground) -> str:
    """3, 4: in which words the device refuses a buffer; commands that fail can't be provoked."""
    if ground.device.kind is DeviceKind.CPU:
        raise NeedsAMac
    most = int(mx.device_info().get("max_buffer_length", 0))
    try:
        mx.eval(mx.zeros((most + 4096,), dtype=mx.uint8))
    except RuntimeError as error:
        return f"{str(error)[:160]}"
    raise Wrong("a buffer larger than the largest was allocated")


def attention(ground: Ground) -> str:
    """5: memory of a late chunk with heads of 256, by blocks and at once."""
    count, dtype = (512, mx.float32) if ground.device.kind is DeviceKind.CPU else (2048, mx.float16)
    q, k = mx.zeros((1, 8, count, 256), dtype), mx.zeros((1, 2, 8 * count, 256), dtype)
    mx.eval(q, k)

    def peak(attend: Callable[[], mx.array]) -> tuple[int, float]:
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(attend())
        used, started = mx.get_peak_memory() - before, time.perf_counter()
        mx.eval(attend())
        return used // _MIB, time.perf_counter() - started

    def at_once() -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, k, scale=0.06, mask="causal")

    blocks, seconds = peak(lambda: MetalAttention()(q, k, k, 0.06, "causal"))
    whole, whole_seconds = peak(at_once)
    return f"blocks {blocks} MiB, {seconds:.3f} s; at once {whole} MiB, {whole_seconds:.3f} s"


def long_prompt(ground: Ground) -> str:
    """6: how long others wait while a long prompt is read."""
    text = "the quick brown fox jumps over the lazy dog. " * 200
    with ThreadPoolExecutor(1) as threads:
        long = threads.submit(ground.ask, text, side=64)
        time.sleep(0.2)
        started = time.monotonic()
        ground.ask("short", side=64, max_tokens=1)
        took = time.monotonic() - started
        long.result()
    return f"a short question beside it took {took:.2f} s"


def encode_in_turns(ground: Ground) -> str:
    """7: the longest pause of a stream while a large picture is encoded."""
    pauses = _pauses(ground, lambda: ground.ask(side=1024, max_tokens=1))
    alone = _pauses(ground, lambda: None)
    return f"longest pause {max(pauses):.3f} s beside it, {max(alone):.3f} s alone"


def memory(ground: Ground) -> str:
    """8: the limit, and what the system says."""
    device, info = ground.device, {} if ground.device.kind is DeviceKind.CPU else mx.device_info()
    recommended = int(info.get("max_recommended_working_set_size", 0))
    pressure = machine.memory_pressure()
    return (
        f"{device.memory_bytes / 2**30:.1f} GiB, recommended {recommended / 2**30:.1f}, limit "
        f"{device.suitable_bytes / 2**30:.1f}; pressure level {pressure}"
    )


def keepalive(ground: Ground) -> str:
    """10: that vanished clients are noticed: options of an accepted connection."""
    ground.needs_a_mac()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPALIVE, 60)  # type: ignore[attr-defined,unused-ignore]
        with socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            inherited = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPALIVE)  # type: ignore[attr-defined,unused-ignore]
            accepted.close()
    return f"an accepted connection has {inherited} s by itself; ours sets 60"


def mrope(ground: Ground) -> str:
    """11: memory after many prompt lengths."""
    before = _engine_bytes(ground)
    for words in range(60):
        ground.ask("word " * words, side=64, max_tokens=1)
    return f"{(_engine_bytes(ground) - before) / 2**20:+.1f} MiB after 60 lengths"


def footprints(ground: Ground) -> str:
    """12: that the memory of other processes can be read."""
    own = footprint_bytes()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        time.sleep(0.5)
        childs = footprint_bytes(child.pid)
        child.communicate(b"\n")
    if not own or not childs:
        raise Wrong(f"{own} and {childs} bytes")
    return f"own {own // _MIB} MiB, a child's {childs // _MIB} MiB"


def draft_widths(ground: Ground) -> str:
    """13: what a product takes for one row and for more."""
    weight = mx.quantize(mx.random.normal((4096, 4096)), bits=4)

    def seconds(rows: int) -> float:
        x, times = mx.random.normal((rows, 4096)), []
        for _ in range(20):
            started = time.perf_counter()
            mx.eval(mx.quantized_matmul(x, *weight, bits=4))
            times.append(time.perf_counter() - started)
        return median(times)

    one = seconds(1)
    return ", ".join(f"{rows} rows {seconds(rows) / one:.2f}x" for rows in (2, 4, 8, 16))


def vision_heads(ground: Ground) -> str:
    """14: attention of a picture by the size of a head."""

    def seconds(size: int) -> float:
        count, dtype = (
            (256, mx.float32) if ground.device.kind is DeviceKind.CPU else (2048, mx.float16)
        )
        q, times = mx.random.normal((1, 16, count, size)).astype(dtype), []
        for _ in range(5):
            started = time.perf_counter()
            mx.eval(mx.fast.scaled_dot_product_attention(q, q, q, scale=0.1))
            times.append(time.perf_counter() - started)
        return 1000 * median(times)

    return ", ".join(f"{size}: {seconds(size):.1f} ms" for size in (64, 72, 80, 88, 96, 128))


def awake(ground: Ground) -> str:
    """15: that the Mac stays awake while a request runs."""
    ground.needs_a_mac()
    long = threading.Thread(target=lambda: ground.ask(max_tokens=200))
    long.start()
    time.sleep(0.3)
    held = subprocess.run(["pmset", "-g", "assertions"], capture_output=True, text=True).stdout
    long.join()
    if "caffeinate" not in held:
        raise Wrong("no assertion is held")
    return "an assertion is held"


def address(ground: Ground) -> str:
    """16: that another program on all addresses is noticed."""
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = str(other.getsockname()[1])
        made = _command("serve", "--port", port, *ground.settings)
    if made.returncode != 75:
        raise Wrong(f"it ended with {made.returncode}")
    return "noticed"


def doctor(ground: Ground) -> str:
    """17, 18: guarded folders, and the system's version."""
    made = _command("doctor", "--json")
    found = [line for line in made.stdout.splitlines() if "warn" in line or "fail" in line]
    version = f"{platform.mac_ver()[0] or platform.release()}"
    return f"ended with {made.returncode}, {len(found)} lines of warnings; Python says {version}"


def disk_writes(ground: Ground) -> str:
    """19: answers while what was computed is written to disk."""
    first = [ground.ask(side=64) for _ in range(4)]
    return f"{len(first)} answers with the disk cache as it is set"


def limits(ground: Ground) -> str:
    """20: limits of the system."""
    names = ("kern.ipc.somaxconn", "kern.maxfilesperproc", "net.local.stream.sendspace")
    found = []
    for name in names if ground.is_mac else ():
        made = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True)
        found.append(f"{name} {made.stdout.strip()}")
    import resource

    return ", ".join([*found, f"open files {resource.getrlimit(resource.RLIMIT_NOFILE)}"])


def figures(ground: Ground) -> str:
    """The first figures of `bench`."""
    made = _command("bench", "--url", f"it={ground.url}/v1", "--rounds", "1")
    return "\n" + made.stdout[-3000:]


POINTS: tuple[Callable[[Ground], str], ...] = (
    service,
    passed_sockets,
    late_errors,
    attention,
    long_prompt,
    encode_in_turns,
    memory,
    keepalive,
    mrope,
    footprints,
    draft_widths,
    vision_heads,
    awake,
    address,
    doctor,
    disk_writes,
    limits,
    figures,
)

# ---- how -----------------------------------------------------------------------------------


def _command(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vlm_server.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


def _engine_bytes(ground: Ground) -> int:
    status = httpx.get(f"{ground.url}/v1/status", timeout=30).json()
    return int(status["engine"]["stats"]["memory"]["footprint_bytes"])


def _pauses(ground: Ground, meanwhile: Callable[[], object]) -> list[float]:
    """Between the pieces of a stream, beside which something is done."""
    body = ground.body("Tell me about it at length", 64, stream=True, max_tokens=200)
    pauses, done = [0.0], threading.Thread(target=meanwhile)
    with httpx.stream("POST", f"{ground.url}/v1/chat/completions", json=body, timeout=300) as made:
        last = None
        for count, _ in enumerate(line for line in made.iter_lines() if line):
            now = time.monotonic()
            if last is not None:
                pauses.append(now - last)
            last = now
            if count == 5:
                done.start()
    if done.ident is not None:
        done.join()
    return pauses


@contextmanager
def _daemon(ground: Ground) -> Iterator[None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", "--port", str(port), "--set", "log.level=warning"]
    words += ["--set", "model.max_context_tokens=8192", *ground.settings]
    with subprocess.Popen([sys.executable, "-m", "vlm_server.cli", *words]) as process:
        ground.url, ground.pid = f"http://127.0.0.1:{port}", process.pid
        try:
            for _ in range(1200):
                if process.poll() is not None:
                    raise SystemExit("the daemon does not start: see above")
                try:
                    if httpx.get(f"{ground.url}/health", timeout=5).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                time.sleep(0.5)
            yield
        finally:
            process.terminate()
            process.wait(60)


def _try(point: Callable[[Ground], str], ground: Ground) -> str:
    try:
        return "ok: " + point(ground)
    except NeedsAMac:
        return "needs a Mac"
    except Exception as error:  # noqa: BLE001  it is reported
        return f"WRONG: {type(error).__name__}: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="first_day_on_a_mac", description=__doc__)
    parser.add_argument("--model", metavar="FOLDER", help="instead of the embedded model")
    parser.add_argument("--without-service", action="store_true", help="install no LaunchAgent")
    parser.add_argument("--out", type=Path, default=Path("first-day.md"))
    wanted = parser.parse_args()
    model = ["--model", wanted.model] if wanted.model else []
    ground = Ground(current_device(), model)
    lines = [
        "# First day on a Mac",
        "",
        f"{platform.platform()}, {ground.device.name}, Python {platform.python_version()}, "
        f"mlx {mx.__version__}",
        "",
    ]
    with _daemon(ground):
        for point in POINTS:
            if point is service and wanted.without_service:
                continue
            title = (point.__doc__ or "").splitlines()[0]
            print(f"{title} …", file=sys.stderr, flush=True)
            lines.append(f"- {title} **{_try(point, ground)}**")
    wanted.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    print(f"\nPlease send {wanted.out}.", file=sys.stderr)


if __name__ == "__main__":
    main()
