"""Measures what clearing costs and saves: `scripts/measure_memory MODEL OUT`.

Runs the engine in this thread, without HTTP, on whatever device MLX has. Writes `memory.json` and
plots into the folder OUT:

- identical requests under four policies of clearing: time to the first token of each;
- long prompts by `memory.prefill_keep_alloc`: time to the first token, and peak memory;
- sixteen long answers with and without the rule for long decodes: tokens/s, and peak memory.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import mlx.core as mx
import numpy as np
from PIL import Image as PillowImage

from vlm_server import settings
from vlm_server.engine.inbox import Inbox
from vlm_server.engine.memory.governor import Governor
from vlm_server.engine.start import build_engine
from vlm_server.platform import heap
from vlm_server.platform.footprint import SystemProcessMemory
from vlm_server.platform.private_folder import PrivateFolder
from vlm_server.protocol import (
    Event,
    Failed,
    Finished,
    Image,
    ImagePart,
    MemoryStats,
    Message,
    SamplingParams,
    Start,
    Submit,
    TextPart,
    Tokens,
)
from vlm_server.runner.caches import build_caches
from vlm_server.runner.device.device import DeviceKind, current_device
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.loading.load import load
from vlm_server.runner.memory import MlxMemory
from vlm_server.supervisor.engine_process.start import for_models

matplotlib.use("agg")
from matplotlib import pyplot

MIB = 1 << 20
DEVICE = current_device()
IS_CPU = DEVICE.kind is DeviceKind.CPU
SIZE = (560, 420) if IS_CPU else (1092, 812)
NO_CACHES = settings.CacheSettings(max_prefix_bytes=0, max_encoder_bytes=0, max_pixel_bytes=0)


class NeverClears(Governor):
    """Keeps whatever was freed, but for what the pool's limit takes."""

    def clear_when_idle(self) -> None:
        self._has_worked, self._idle_since = False, None


class ClearsAtNextPrefill(NeverClears):
    """As servers do that clear when the next request comes."""

    def before_chunk(self) -> None:
        self._clear("prefill")
        super().before_chunk()


class ClearsNotWhileDecoding(Governor):
    def after_decode(self, num_seqs: int, *, awaits_first_token: bool) -> None:
        pass


class Engine:
    """One engine in this process, and when each request's tokens came."""

    def __init__(
        self,
        loaded: LoadedModel,
        kind: type[Governor],
        memory: settings.MemorySettings,
        cache: settings.CacheSettings,
    ) -> None:
        start = Start(
            settings.ModelSettings(),
            settings.SchedulerSettings(),
            settings.EngineSettings(),
            settings.Log(),
            memory,
        )
        device = MlxMemory(memory, DEVICE)
        caches = build_caches(cache, device.read(), loaded)
        self.governor = kind(memory, device, SystemProcessMemory(), caches)
        self.inbox = Inbox()
        self.loop = build_engine(start, loaded, self.governor, caches, self.inbox, self._take)
        self.times: dict[str, list[float]] = {}
        self._num_ended = self._number = 0

    def ask(self, text: str, picture: Image | None = None, max_tokens: int = 16) -> str:
        """Post a request; its name."""
        self._number += 1
        name = f"{self._number}"
        parts = (ImagePart(0), TextPart(text)) if picture else (TextPart(text),)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.times[name] = [time.perf_counter()]
        pictures = (picture,) if picture else ()
        self.inbox.put(Submit(name, (Message("user", parts),), pictures, sampling))
        return name

    def wait(self, count: int = 1) -> None:
        """Work until `count` requests have ended."""
        wanted = self._num_ended + count
        while self._num_ended < wanted:
            self.loop.step()

    def rest(self, seconds: float) -> None:
        """Ask nothing for a while, in which the governor may do what it does when idle."""
        end = time.monotonic() + seconds
        while (left := self.governor.seconds_until_clear()) is not None:
            if time.monotonic() + left > end:
                break
            self.loop.step()
        time.sleep(max(0.0, end - time.monotonic()))

    def ttft_ms(self, name: str) -> float:
        posted, first, *_ = self.times[name]
        return 1000 * (first - posted)

    @property
    def stats(self) -> MemoryStats:
        return self.governor.stats()

    def _take(self, event: Event) -> None:
        if isinstance(event, Tokens):
            now = time.perf_counter()
            for delta in event.deltas:
                self.times[delta.request_id].append(now)
        if isinstance(event, Failed):
            raise RuntimeError(event.message)
        if isinstance(event, Finished):
            self._num_ended += 1


@contextmanager
def engine(
    loaded: LoadedModel, kind: type[Governor] = Governor, cache: Any = NO_CACHES, **memory: Any
) -> Iterator[Engine]:
    """An engine whose governor is of `kind`, warm."""
    made = Engine(loaded, kind, settings.MemorySettings(**memory), cache)
    for number in range(2):
        made.ask("warm", picture(900 + number))
        made.wait()
    made.ask("word " * 600)
    made.wait()
    made.governor.reset_stats()
    mx.reset_peak_memory()
    yield made
    made.loop.run_until_idle()
    mx.clear_cache()


def picture(seed: int) -> Image:
    width, height = SIZE
    blocks = np.random.default_rng(seed).integers(0, 255, (41, 55, 3), dtype=np.uint8)
    pixels = blocks.repeat(20, 0).repeat(20, 1)[:height, :width]
    buffer = io.BytesIO()
    PillowImage.fromarray(pixels).save(buffer, "PNG")
    return Image(buffer.getvalue(), f"{seed}", "PNG", width, height, "messages[0]")


def series(loaded: LoadedModel, count: int) -> dict[str, Any]:
    """Identical requests, a pause after each in which an idle clear would come."""
    policies: dict[str, tuple[type[Governor], dict[str, Any]]] = {
        "never": (NeverClears, {"prefill_keep_alloc": "always"}),
        "at completion, idle (as built)": (Governor, {}),
        "at the next prefill": (ClearsAtNextPrefill, {"prefill_keep_alloc": "always"}),
        "after every chunk": (NeverClears, {"prefill_keep_alloc": "never"}),
    }
    shown, found = picture(1), {}
    for name, (kind, memory) in policies.items():
        with engine(loaded, kind, idle_clear_seconds=0.03, **memory) as running:
            ttfts = []
            for _ in range(count):
                asked = running.ask("Describe this image.", shown, 4)
                running.wait()
                ttfts.append(running.ttft_ms(asked))
                running.rest(0.1)
            found[name] = {
                "ttft_ms": ttfts,
                "median_ms": statistics.median(ttfts[2:]),
                "p90_ms": sorted(ttfts[2:])[int(0.9 * (count - 2))],
                "slowest_ms": max(ttfts[2:]),
                "pool_mib": running.stats.pool_bytes / MIB,
                "decisions": running.stats.decisions,
                "clear_seconds": running.stats.clear_seconds,
            }
        print(name, {k: v for k, v in found[name].items() if k != "ttft_ms"}, flush=True)
    return found


def long_prompts(loaded: LoadedModel, sizes: list[int], rounds: int) -> dict[str, Any]:
    """Prompts of about so many tokens, one policy after the other in each round.

    "Tight" is a memory limit 5 % above the most that `never` held. On a GPU, which plans for each
    new shape, an engine's first prompt of a size is not counted.
    """
    num_skipped, num_counted = (0, 1) if IS_CPU else (1, 5)
    policies = [
        "never",
        "always",
        "auto, tight",
        *([] if IS_CPU else ["always, tight"]),
    ]
    found: dict[str, Any] = {}
    for size in sizes:
        for policy in rounds * policies:
            one = found.setdefault(f"{size} {policy}", {"ttft_ms": [], "held_mib": 0.0})
            memory: dict[str, Any] = {"prefill_keep_alloc": policy.removesuffix(", tight")}
            if policy.endswith("tight"):
                memory["max_bytes"] = int(1.05 * found[f"{size} never"]["held_mib"] * MIB)
            with engine(loaded, NeverClears, **memory) as running:
                most = watch(running)
                for number in range(num_skipped + num_counted):
                    asked = running.ask(f"{number} " + "word " * (size // 5), max_tokens=1)
                    running.wait()
                    if number >= num_skipped:
                        one["ttft_ms"].append(running.ttft_ms(asked))
                one["held_mib"] = max(one["held_mib"], most() / MIB)
                one["median_ms"] = statistics.median(one["ttft_ms"])
                one["peak_mib"] = running.stats.peak_bytes / MIB
                one["decisions"] = running.stats.decisions
                one["clear_seconds"] = running.stats.clear_seconds
            print(size, policy, one, flush=True)
    return found


def long_answers(loaded: LoadedModel, tokens: int) -> dict[str, Any]:
    found = {}
    for name, kind in {"with": Governor, "without": ClearsNotWhileDecoding}.items():
        with engine(loaded, kind) as running:
            most = watch(running)
            started = time.perf_counter()
            for number in range(16):
                running.ask(f"{number} " + "word " * 20 * number, max_tokens=tokens)
            running.wait(16)
            seconds = time.perf_counter() - started
            found[name] = {
                "tokens_per_second": 16 * tokens / seconds,
                "peak_mib": running.stats.peak_bytes / MIB,
                "held_mib": most() / MIB,
                "decisions": running.stats.decisions,
                "clear_seconds": running.stats.clear_seconds,
            }
        print(name, found[name], flush=True)
    return found


def watch(running: Engine) -> Callable[[], float]:
    """Ends the watch, and gives the most bytes that arrays and pool held together."""
    most, done = [0], threading.Event()

    def look() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], mx.get_active_memory() + mx.get_cache_memory())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()

    def end() -> float:
        done.set()
        thread.join()
        return most[0]

    return end


def plot(found: dict[str, Any], out: Path) -> None:
    figure, axes = pyplot.subplots(len(found), 1, figsize=(9, 8), sharex=True, sharey=True)
    for axis, (name, one) in zip(axes, found.items(), strict=True):
        axis.plot(one["ttft_ms"][2:], linewidth=0.9)
        axis.axhline(one["median_ms"], color="grey", linewidth=0.6)
        axis.set_title(f"{name}: median {one['median_ms']:.0f} ms", fontsize=9, loc="left")
        axis.set_ylabel("TTFT, ms", fontsize=8)
    axes[-1].set_xlabel("request")
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def plot_prompts(found: dict[str, Any], out: Path) -> None:
    """By prompt size and policy, as the keys name them: seconds, and the most that was held."""
    sizes, policies = (
        list(dict.fromkeys(key.split(" ", 1)[place] for key in found)) for place in (0, 1)
    )
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    titles = {"median_ms": "TTFT, median, ms", "held_mib": "arrays and pool at most, MiB"}
    width = 0.8 / len(policies)
    for axis, (field, title) in zip(axes, titles.items(), strict=True):
        for number, policy in enumerate(policies):
            heights = [found[f"{size} {policy}"][field] for size in sizes]
            places = [
                place + (number - (len(policies) - 1) / 2) * width for place in range(len(sizes))
            ]
            axis.bar(places, heights, 0.9 * width, label=policy)
        axis.set_xticks(range(len(sizes)), [f"{size} tokens" for size in sizes])
        axis.set_title(title, fontsize=10, loc="left")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def preload_openblas() -> None:
    """Start this program again unless OpenBLAS was there before MLX, as in an engine."""
    if "VLM_PRELOADED" in os.environ:
        return
    own = {"VLM_PRELOADED": "1", "OPENBLAS_THREAD_TIMEOUT": "14"}
    of_engine = for_models(PrivateFolder(), settings.EngineSettings())
    os.execve(sys.executable, [sys.executable, *sys.argv], {**own, **os.environ, **of_engine})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=200, help="of identical requests; 0: none")
    parser.add_argument("--prompts", default="8192,16384,32768", help="tokens, about; '': none")
    parser.add_argument("--rounds", type=int, default=4, help="of long prompts")
    parser.add_argument("--answers", type=int, default=1024, help="tokens of each; 0: none")
    arguments = parser.parse_args()
    preload_openblas()
    heap.share_one_heap()  # as the engine's
    arguments.out.mkdir(parents=True, exist_ok=True)
    model = settings.ModelSettings(path=str(arguments.model))
    loaded = load(model, DEVICE, DEVICE.memory_bytes)
    found: dict[str, Any] = {"device": str(mx.default_device())}
    if arguments.count:
        found["series"] = series(loaded, arguments.count)
        plot(found["series"], arguments.out / "clearing.png")
    if sizes := [int(size) for size in arguments.prompts.split(",") if size]:
        found["long prompts"] = long_prompts(loaded, sizes, arguments.rounds)
        plot_prompts(found["long prompts"], arguments.out / "prompts.png")
    if arguments.answers:
        found["long answers"] = long_answers(loaded, arguments.answers)
    (arguments.out / "memory.json").write_text(json.dumps(found, indent=1))
    os._exit(0)  # threads that used MLX may abort a process that ends in order


if __name__ == "__main__":
    main()
