"""Batches drawn by worker processes into shared memory. Knows numpy; knows no PyTorch.

All samples of a batch hold the same number of pictures, and their n-th pictures have one size.
"""

from __future__ import annotations

import mmap
import multiprocessing as mp
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from demo_model.conversations import Mix, on_groups, on_one_picture, text_only
from demo_model.encode import IGNORED, Conversation, Encoded, Encoder, merged_tokens
from demo_model.fonts import FontBook, Words
from demo_model.multi_image import on_frames, on_several, on_video
from demo_model.pages import on_page
from demo_model.scenes import Artist
from demo_model.screens import on_screens
from demo_model.shape import BLOCK, MAX_PIXELS, MIN_PIXELS, PATCH
from demo_model.tools import on_tool_series, on_tools

Size = tuple[int, int]
BUFFER_BYTES = 640 * 2**20
BUFFERS = 3
USUAL_GRIDS = (
    (13, 13), (13, 13), (13, 13), (11, 15), (11, 15), (15, 11), (9, 17), (9, 17), (10, 16),
    (8, 8), (8, 8), (7, 7), (7, 7), (10, 10), (10, 10), (12, 12), (8, 10), (9, 12), (6, 9), (9, 6),
    (6, 19), (7, 22), (17, 9), (16, 10), (10, 14), (12, 13), (7, 13), (12, 14), (14, 12),
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What the workers draw: shares of the kinds of batches, and the size of a batch."""

    patches: int = 131072
    largest: int = 640
    mix: Mix = field(default_factory=Mix)
    kinds: tuple[str, ...] = (
        "single", "pair", "triple", "frames", "video", "text", "tools", "results", "series",
    )  # fmt: skip
    shares: tuple[float, ...] = (0.45, 0.08, 0.02, 0.02, 0.03, 0.02, 0.16, 0.12, 0.10)


# A last stage: small batches, so that it fits a CPU, of all that is known.
FINISHING = Plan(
    patches=7168,
    largest=32,
    mix=Mix(words=0.55, both=0.2),
    kinds=(
        "small_series", "small_tools", "small_results", "counting", "small", "small_pair", "text",
        "frames", "video", "screens", "page",
    ),
    shares=(0.16, 0.10, 0.06, 0.05, 0.12, 0.05, 0.02, 0.20, 0.06, 0.10, 0.08),
)  # fmt: skip


# Long conversations and pages, beside all that is known already.
LONG = Plan(
    patches=24576,
    largest=96,
    mix=Mix(words=0.55, both=0.2),
    kinds=(
        "screens", "page", "small_series", "small_tools", "small_results", "small", "single",
        "small_pair", "counting", "text", "frames", "video",
    ),
    shares=(0.28, 0.24, 0.06, 0.05, 0.04, 0.05, 0.07, 0.03, 0.12, 0.01, 0.03, 0.02),
)  # fmt: skip
SCREENS_TOKENS = 1.25
"""Tokens in a batch of long conversations, for each patch of other batches."""


@dataclass
class Batch:
    """Where each array lies in the shared buffer, as (name, dtype, shape, offset).

    ids: (samples, length); positions: (3, samples, length); targets, target_at, weights: one
    entry a token of an answer; pixels<i>: (samples, frames, height, width, 3); places<i>:
    (samples, tokens), where in (samples * length) the picture's tokens are.
    turns: (task, tokens of the answer).
    """

    arrays: list[tuple[str, str, tuple[int, ...], int]]
    used_bytes: int
    pictures: int
    turns: list[tuple[str, int]]
    kind: str


class Packer:
    """Lays arrays one after another into a buffer, 64-byte aligned."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.arrays: list[tuple[str, str, tuple[int, ...], int]] = []
        self.offset = 0

    def reserve(self, name: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
        count = int(np.prod(shape))
        view = np.frombuffer(self.buffer, dtype, count, self.offset).reshape(shape)
        self.arrays.append((name, dtype, shape, self.offset))
        self.offset += (view.nbytes + 63) // 64 * 64
        return view

    def add(self, name: str, array: NDArray[Any]) -> None:
        self.reserve(name, array.dtype.name, array.shape)[...] = array


def random_grid(rng: random.Random) -> Size:
    """(height, width) that the processor's limits allow."""
    if rng.random() < 0.7:
        rows, cols = rng.choice(USUAL_GRIDS)
        return rows * BLOCK, cols * BLOCK
    while True:
        rows, cols = rng.randint(5, 22), rng.randint(5, 22)
        if MIN_PIXELS <= rows * cols * BLOCK**2 <= MAX_PIXELS and max(rows, cols) <= 4 * min(
            rows, cols
        ):
            return rows * BLOCK, cols * BLOCK


def small_grid(rng: random.Random) -> Size:
    rows = rng.randint(6, 12)
    return rows * BLOCK, max(
        5, min(14, round(rows * rng.choice((1.0, 1.0, 1.33, 0.75, 1.6))))
    ) * BLOCK


class Drawer:
    """Draws whole batches; one in every worker process."""

    def __init__(self, artist: Artist, encoder: Encoder, plan: Plan) -> None:
        self.artist = artist
        self.encoder = encoder
        self.plan = plan

    def sizes(self, rng: random.Random, kind: str) -> tuple[list[Size], int]:
        """The batch's picture sizes, and how many frames each holds."""
        if kind in ("single", "tools", "series"):
            return [random_grid(rng)], 1
        if kind == "counting" or kind.startswith("small"):
            grids = ((7, 7), (7, 7), (8, 8), (7, 8), (8, 7), (6, 9), (7, 10), (10, 6))
            chosen = rng.sample(grids, 2 if kind in ("small_pair", "small_results") else 1)
            return [(rows * BLOCK, cols * BLOCK) for rows, cols in chosen], 1
        if kind == "page":
            return [rng.choice((random_grid(rng), (13 * BLOCK, 13 * BLOCK)))], 1
        if kind == "screens":
            grids = rng.choice(((7, 7), (13, 13), None, None))
            most = 26 if grids == (13, 13) or rng.random() < 0.5 else 12
            sizes = [grids or (small_grid(rng)) for _ in range(rng.randint(4, most))]
            return [(h * BLOCK, w * BLOCK) if grids else (h, w) for h, w in sizes], 1
        if kind in ("pair", "results"):
            first = random_grid(rng)
            return [first, first if rng.random() < 0.4 else random_grid(rng)], 1
        if kind == "triple":
            return [small_grid(rng) for _ in range(3)], 1
        if kind == "frames":
            return [random_grid(rng) if rng.random() < 0.3 else small_grid(rng)] * rng.randint(
                2, 4
            ), 1
        if kind == "video":
            return [small_grid(rng)] * rng.randint(2, 4), 2
        return [], 1

    def conversation(self, rng: random.Random, kind: str, sizes: list[Size]) -> Conversation:
        if kind in ("single", "small"):
            return on_one_picture(rng, self.artist, sizes[0], self.plan.mix)
        if kind in ("tools", "results", "small_tools", "small_results"):
            return on_tools(rng, self.artist, sizes)
        if kind == "screens":
            return on_screens(rng, self.artist, sizes)
        if kind == "page":
            return on_page(rng, self.artist, sizes[0])
        if kind in ("series", "small_series"):
            return on_tool_series(rng, self.artist, sizes[0])
        if kind == "counting":
            return on_groups(rng, self.artist, sizes[0])
        if kind in ("pair", "triple", "small_pair"):
            return on_several(rng, self.artist, sizes, self.plan.mix)
        if kind == "frames":
            return on_frames(rng, self.artist, sizes)
        if kind == "video":
            return on_video(rng, self.artist, sizes[0], len(sizes))
        return text_only(rng)

    def draw(self, rng: random.Random, buffer: mmap.mmap) -> Batch:
        """One batch; its pictures go into `buffer`, one after another."""
        kind = rng.choices(self.plan.kinds, self.plan.shares)[0]
        sizes, frames = self.sizes(rng, kind)
        patches = frames * sum(h * w // PATCH**2 for h, w in sizes) or 512
        count = max(16, min(self.plan.largest, self.plan.patches // patches))
        if kind == "screens":
            tokens = sum(merged_tokens(*size) + 50 for size in sizes)
            most = int(SCREENS_TOKENS * self.plan.patches) // tokens
            count = max(1, min(self.plan.largest, most))
        packer = Packer(buffer)
        views = [
            packer.reserve(f"pixels{i}", "uint8", (count, frames, height, width, 3))
            for i, (height, width) in enumerate(sizes)
        ]
        encoded, tasks = [], []
        for number in range(count):
            conversation = self.conversation(rng, kind, sizes)
            for index, picture in enumerate(conversation.pictures):
                views[index // frames][number, index % frames] = picture
            encoded.append(self.encoder.encode(conversation, sizes))
            tasks.append([turn.task for turn in conversation.turns])
        turns = collate(packer, encoded, tasks, sizes)
        return Batch(packer.arrays, packer.offset, len(sizes), turns, kind)


def collate(
    packer: Packer, encoded: list[Encoded], tasks: list[list[str]], sizes: list[Size]
) -> list[tuple[str, int]]:
    """Pad and pack the samples' tokens; returns each answer's (task, tokens)."""
    longest = max(len(e.ids) for e in encoded)
    length = (longest + 31) // 32 * 32
    count = len(encoded)
    ids = packer.reserve("ids", "int64", (count, length))
    positions = packer.reserve("positions", "int32", (3, count, length))
    ids[...] = 0
    positions[...] = 0
    targets, places, weights, turns = [], [], [], []
    for number, e in enumerate(encoded):
        ids[number, : len(e.ids)] = e.ids
        positions[:, number, : len(e.ids)] = e.positions
        at = np.flatnonzero(e.labels != IGNORED)
        targets.append(e.labels[at])
        places.append(at + number * length)
        for task, (begin, end) in zip(tasks[number], e.spans, strict=True):
            weights.append(np.full(end - begin, (end - begin) ** -0.5, np.float32))
            turns.append((task, end - begin))
    packer.add("targets", np.concatenate(targets))
    packer.add("target_at", np.concatenate(places))
    packer.add("weights", np.concatenate(weights))
    rows = np.arange(count)[:, None] * length
    for index, size in enumerate(sizes):
        starts = np.array([[e.starts[index]] for e in encoded])
        packer.add(f"places{index}", rows + starts + np.arange(merged_tokens(*size))[None])
    return turns


@dataclass(frozen=True)
class Sources:
    """Where a worker finds what it draws with."""

    fonts: list[str]
    words: Path
    tokenizer: str
    plan: Plan


def _work(
    seed: int, sources: Sources, buffers: dict[int, mmap.mmap], free: Any, out: Any, ease: Any
) -> None:
    rng = random.Random(seed)
    artist = Artist(FontBook(sources.fonts), Words(sources.words))
    drawer = Drawer(artist, Encoder(Tokenizer.from_str(sources.tokenizer)), sources.plan)
    while True:
        number = free.get()
        artist.ease = ease.value
        out.put((number, seed, drawer.draw(rng, buffers[number])))


class Workers:
    """A pool of processes that keep drawing; `get` a batch, then `release` its buffer."""

    def __init__(self, count: int, sources: Sources, seed: int) -> None:
        context = mp.get_context("fork")
        self.ease = context.Value("d", 1.0)
        self.out = context.Queue()
        self.memories: dict[int, mmap.mmap] = {}
        self.free: dict[int, Any] = {}
        self.processes = []
        for number in range(count):
            worker = seed * 1000 + number
            buffers = {number * BUFFERS + i: mmap.mmap(-1, BUFFER_BYTES) for i in range(BUFFERS)}
            self.memories |= buffers
            self.free[worker] = context.Queue()
            for buffer in buffers:
                self.free[worker].put(buffer)
            process = context.Process(
                target=_work,
                args=(worker, sources, buffers, self.free[worker], self.out, self.ease),
                daemon=True,
            )
            process.start()
            self.processes.append(process)

    def get(self) -> tuple[int, int, Batch]:
        """(buffer, worker, batch); raises queue.Empty after two minutes."""
        return self.out.get(timeout=120)

    def release(self, buffer: int, worker: int) -> None:
        self.free[worker].put(buffer)

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
