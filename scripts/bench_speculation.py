"""What verified drafts bring: real text replayed through the real engine, with and without them.

The sampler is scripted: it draws the next token of a given text, whatever the model says. All else
is as it is in the daemon: drafts, their verification, caches and grammars. Takes a model of
`bench_models --words`; prints JSON: tokens per second without and with drafts, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import mlx.core as mx

from vlm_server.engine.loop import EngineLoop
from vlm_server.engine.memory.governor import Governor
from vlm_server.engine.start import build_engine
from vlm_server.platform.footprint import SystemProcessMemory
from vlm_server.protocol import Event, Failed, SamplingParams, Start, Submit, Tokens
from vlm_server.runner.caches import build_caches
from vlm_server.runner.decode import sequence
from vlm_server.runner.device.device import current_device
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.loading.load import load
from vlm_server.runner.memory import MlxMemory
from vlm_server.runner.sampling import SequenceSampler
from vlm_server.settings import (
    CacheSettings,
    EngineSettings,
    Log,
    MemorySettings,
    ModelSettings,
    SchedulerSettings,
)

DOCS = Path(__file__).parents[1] / "docs"
ELEMENTS = [
    f"{kind}-{name}"
    for kind in ("button", "input", "link", "menu-item")
    for name in ("save-draft", "search-query", "open-settings", "next-page", "attach-file")
]
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "product_name": {"type": "string"},
            "unit_price": {"type": "number"},
            "in_stock": {"type": "boolean"},
            "delivery_days": {"type": "integer"},
        },
        "required": ["product_name", "unit_price", "in_stock", "delivery_days"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True)
class Work:
    """A prompt, the answer that is drawn, and the schema that holds it, if one does."""

    prompt: str
    answer: str
    schema: Any = None


def works(seed: int) -> dict[str, Work]:
    """One of each kind; another seed gives other texts."""
    draw = random.Random(seed)
    return {
        "agent": _agent(draw),
        "json": _json(draw),
        "copy": _copy(draw),
        "prose": _prose(draw),
    }


def _call(draw: random.Random) -> str:
    arguments = {
        "element": draw.choice(ELEMENTS),
        "x": draw.randrange(1280),
        "y": draw.randrange(800),
    }
    call = json.dumps(
        {"name": draw.choice(("click", "hover", "scroll_to")), "arguments": arguments}
    )
    return f"<tool_call>\n{call}\n</tool_call>"


def _agent(draw: random.Random) -> Work:
    seen = "\n".join(
        f"{name} at ({draw.randrange(1280)}, {draw.randrange(800)})" for name in ELEMENTS
    )
    steps = "\n".join(f"Step {i}.\n{_call(draw)}\nDone." for i in range(6))
    prompt = f"You control a screen. Its elements:\n{seen}\nSo far:\n{steps}\nGo on."
    return Work(prompt, "\n".join(f"Step {i}.\n{_call(draw)}\nDone." for i in range(6, 12)))


def _json(draw: random.Random) -> Work:
    adjectives, nouns = ("red", "large", "folding", "quiet"), ("chair", "lamp", "kettle", "shelf")
    items = [
        {
            "product_name": f"{draw.choice(adjectives)} {draw.choice(nouns)}",
            "unit_price": draw.randrange(100, 9999) / 100,
            "in_stock": draw.random() < 0.5,
            "delivery_days": draw.randrange(1, 30),
        }
        for _ in range(8)
    ]
    return Work("List what is on the picture as JSON.", json.dumps(items), SCHEMA)


def _copy(draw: random.Random) -> Work:
    paragraphs = _paragraphs("memory.md")
    start = draw.randrange(max(len(paragraphs) - 6, 1))
    page = "\n\n".join(paragraphs[start : start + 6])
    words = "\n\n".join(paragraphs[start + 1 : start + 3]).split(" ")
    for _ in range(len(words) // 25):  # it is corrected on the way
        words[draw.randrange(len(words))] = draw.choice(("really", "never", "once"))
    return Work(f"{page}\n\nRepeat the second and third paragraph, corrected.", " ".join(words))


def _prose(draw: random.Random) -> Work:
    paragraphs = _paragraphs("architecture.md")
    start = draw.randrange(max(len(paragraphs) - 3, 1))
    return Work("How does it work?", paragraphs[start])


def _paragraphs(page: str) -> list[str]:
    found = (DOCS / page).read_text().split("\n\n")
    return [text for text in found if len(text) > 200 and not text.startswith(("|", "```", "<"))]


SCRIPTS: dict[int, list[int]] = {}
"""What is drawn, by seed."""


class ScriptedSampler(SequenceSampler):
    """Draws what its script says, of what its grammar allows."""

    is_plainly_greedy = False  # type: ignore[assignment]  # a property of the base

    def adjust(self, scores: mx.array) -> mx.array:
        adjusted = super().adjust(scores)
        script = SCRIPTS[self._seed]
        if self._step < len(script):
            token_id = script[self._step]
            adjusted[token_id] = adjusted[token_id] + 1e6
        return adjusted


def new_engine(loaded: LoadedModel, num_speculative_tokens: int) -> EngineLoop:
    memory, cache = (
        MlxMemory(MemorySettings(), loaded.device),
        CacheSettings(max_prefix_bytes=0, max_disk_bytes=0),
    )
    caches = build_caches(cache, memory.read(), loaded)
    start = Start(
        model=ModelSettings(),
        engine=EngineSettings(),
        log=Log(),
        scheduler=SchedulerSettings(num_speculative_tokens=num_speculative_tokens),
        cache=cache,
    )
    governor = Governor(MemorySettings(), memory, SystemProcessMemory(), caches)
    return build_engine(start, loaded, governor, caches, SimpleQueue(), lambda event: None)


def run(engine: EngineLoop, loaded: LoadedModel, kind: str, rows: int) -> tuple[float, float]:
    """Tokens per second from the first to the last, and the part of drafts that were right."""
    times: list[float] = []
    texts = dict[str, str]()

    def take(event: Event) -> None:
        assert not isinstance(event, Failed), event
        if isinstance(event, Tokens):
            times.extend([time.perf_counter()] * len(event.deltas))
            for delta in event.deltas:
                texts[delta.request_id] = texts.get(delta.request_id, "") + delta.text

    engine.scheduler.reset_stats()
    answers = {}
    for row in range(rows):
        work = works(row)[kind]
        ids = loaded.spec.backend.encode(work.answer, add_special_tokens=False).ids
        SCRIPTS[row + 1], answers[f"r{row}"] = list(ids), work.answer
        schema = None if work.schema is None else json.dumps(work.schema)
        params = SamplingParams(
            max_tokens=len(ids), temperature=0.0, seed=row + 1, json_schema=schema
        )
        engine.inbox.put(Submit(f"r{row}", (), (), params, prompt=work.prompt))
    replace(engine, send=take).run_until_idle()
    assert texts == answers, "something else was drawn"
    counts = engine.scheduler.stats()
    right = counts.spec_accepted_tokens / max(counts.spec_draft_tokens, 1)
    return (len(times) - rows) / (times[-1] - times[0]), right


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_speculation", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", default=["agent", "json", "copy", "prose"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    wanted = parser.parse_args()
    device = current_device()
    loaded = load(ModelSettings(path=str(wanted.model)), device, device.suitable_bytes)
    sequence.SequenceSampler = ScriptedSampler  # type: ignore[attr-defined]
    engines = {name: new_engine(loaded, count) for name, count in (("plain", 0), ("drafts", 15))}
    for kind in wanted.kinds:
        for rows in wanted.rows:
            for engine in engines.values():
                run(engine, loaded, kind, rows)  # what is compiled or measured once
            rounds = [
                {name: run(engine, loaded, kind, rows) for name, engine in engines.items()}
                for _ in range(wanted.rounds)
            ]
            ratios = sorted(one["drafts"][0] / one["plain"][0] for one in rounds)
            print(
                json.dumps(
                    {
                        "kind": kind,
                        "rows": rows,
                        "plain": round(statistics.median(one["plain"][0] for one in rounds), 1),
                        "drafts": round(statistics.median(one["drafts"][0] for one in rounds), 1),
                        "ratio": round(statistics.median(ratios), 2),
                        "spread": [round(ratios[0], 2), round(ratios[-1], 2)],
                        "right": round(rounds[-1]["drafts"][1], 2),
                    }
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
