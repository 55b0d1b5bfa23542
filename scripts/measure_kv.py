"""Measures what cached KV of 8 and 4 bits (`cache.kv_bits`) costs and saves. Prints JSON lines.

- `errors`: for each tiny model, how far the logits of tokens are off that continue from a prefix
  that was stored with 8 or 4 bits, and how often the likeliest token is still the same.
- `perplexity MODEL`: the same, and the perplexity, of a trained model on this repository's pages.
- `hits MODEL`: the time to the first token of prompts with a long cached prefix, in turns with 16,
  8 and 4 bits.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from measure_memory import Engine, preload_openblas

from tests.integration.harness import load_model
from tests.tiny_models import FAMILIES, TEXT_FAMILIES, cached
from vlm_server.cache.kv_storage import KVStorage
from vlm_server.engine.memory.governor import Governor
from vlm_server.runner.kv.layers import can_store, new_layers
from vlm_server.runner.kv.segments import KVSegment, LayerStates, SequenceState, restore, snapshot
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.model.lm_head import WantedLogits, logits_of
from vlm_server.settings import CacheSettings, MemorySettings

Json = dict[str, Any]
STORAGES = (KVStorage(8), KVStorage(4), KVStorage(4, 32))
TINY_TOKENS, TINY_PROMPTS = (192, 64), 8
"""Tokens of a prefix, and of what continues it; prompts of each family."""
PAGE_TOKENS, NUM_PAGES = (768, 256), 8
BITS = (16, 8, 4)


@dataclass(frozen=True)
class Prefix:
    """The `PrefixState` of one segment."""

    segment: KVSegment
    length: int
    snapshot: LayerStates

    @property
    def segments(self) -> list[tuple[KVSegment, int]]:
        return [(self.segment, self.length)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="measure_kv", description=__doc__)
    parser.add_argument("what", choices=("errors", "perplexity", "hits"))
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--tokens", default="1024,4096", help="lengths of the cached prefixes")
    parser.add_argument("--rounds", type=int, default=12)
    wanted = parser.parse_args()
    preload_openblas()
    if wanted.what == "errors":
        lines = errors()
    elif wanted.what == "perplexity":
        lines = perplexity(load_model(wanted.model))
    else:
        lengths = [int(length) for length in wanted.tokens.split(",")]
        lines = hits(load_model(wanted.model), lengths, wanted.rounds)
    for line in lines:
        print(json.dumps(line), flush=True)


# ---- errors --------------------------------------------------------------------------


def errors() -> Iterator[Json]:
    for name in (*FAMILIES, *TEXT_FAMILIES):
        loaded = load_model(cached(name))
        if not can_store(loaded.language_model):
            yield {"family": name, "stored": False}
            continue
        rng = random.Random(name)
        size = loaded.spec.vocabulary_size
        prompts = [
            [rng.randrange(size) for _ in range(sum(TINY_TOKENS))] for _ in range(TINY_PROMPTS)
        ]
        yield {"family": name, **_compare(loaded, prompts, TINY_TOKENS[0])}


def perplexity(loaded: LoadedModel) -> Iterator[Json]:
    """Of `NUM_PAGES` parts of the documentation, each after a cached prefix."""
    pages = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
    text = "\n\n".join(page.read_text(encoding="utf-8") for page in pages)
    token_ids = loaded.spec.tokenizer.encode(text)
    length = sum(PAGE_TOKENS)
    prompts = [token_ids[at : at + length] for at in range(0, NUM_PAGES * length, length)]
    yield _compare(loaded, prompts, PAGE_TOKENS[0])


def _compare(loaded: LoadedModel, prompts: Sequence[list[int]], num_cached: int) -> Json:
    """Figures of each storage over the continuations of all prompts."""
    results: dict[str, list[Json]] = {}
    for prompt in prompts:
        layers, states = _prefill(loaded, prompt[:num_cached])
        exact = None
        for name, segment in _segments(SequenceState(layers, {}), num_cached):
            logits = _continue(loaded, Prefix(segment, num_cached, states), prompt[num_cached:])
            exact = logits if exact is None else exact
            row = _figures(logits, exact, prompt[num_cached:]) | _bytes(segment)
            results.setdefault(name, []).append(row)
    return {name: _summary(rows) for name, rows in results.items()}


def _segments(state: SequenceState, num_tokens: int) -> Iterator[tuple[str, KVSegment]]:
    """The same KV exactly, rounded to bfloat16 for comparison, and quantized."""
    exact = state.take(0, num_tokens)
    yield "exact", exact
    rounded = (array.astype(mx.bfloat16).astype(array.dtype) for array in exact.arrays)
    yield "bfloat16", KVSegment(tuple(rounded))
    for storage in STORAGES:
        name = f"{storage.bits} bits, group {storage.group_size}"
        yield name, state.stored_as(storage).take(0, num_tokens)


def _prefill(loaded: LoadedModel, token_ids: list[int]) -> tuple[list[Any], LayerStates]:
    layers = new_layers(loaded.language_model)
    loaded.language_model(mx.array([token_ids]), cache=layers)
    loaded.forget_positions()
    mx.eval([layer.state for layer in layers])
    return layers, snapshot(layers)


def _continue(loaded: LoadedModel, prefix: Prefix, token_ids: list[int]) -> mx.array:
    """Logits of `token_ids`, (tokens, vocabulary) float32."""
    layers = new_layers(loaded.language_model)
    restore(layers, prefix, prefix.length + len(token_ids))
    wanted = WantedLogits(num_tokens=len(token_ids))
    with logits_of(loaded.language_model, wanted):
        logits = loaded.language_model(mx.array([token_ids]), cache=layers).logits[0]
    loaded.forget_positions()
    return logits.astype(mx.float32)


def _figures(logits: mx.array, exact: mx.array, token_ids: list[int]) -> Json:
    probabilities = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    nll = -mx.take_along_axis(probabilities[:-1], mx.array(token_ids[1:])[:, None], axis=-1)
    same = logits.argmax(axis=-1) == exact.argmax(axis=-1)
    error = mx.sqrt(mx.square(logits - exact).mean()) / mx.sqrt(mx.var(exact, axis=-1).mean())
    largest = mx.abs(logits - exact).max() / mx.sqrt(mx.var(exact, axis=-1).mean())
    return {
        "nll": nll.mean().item(),
        "same": same.astype(mx.float32).mean().item(),
        "error": error.item(),
        "largest": largest.item(),
    }


def _bytes(segment: KVSegment) -> Json:
    is_quantized = any(array.dtype in (mx.int8, mx.uint8) for array in segment.arrays)
    return {"bytes": segment.size_bytes, "quantized": is_quantized}


def _summary(rows: list[Json]) -> Json:
    """Errors are in standard deviations of a token's logits."""
    nll = [row["nll"] for row in rows]
    return {
        "quantized": rows[0]["quantized"],
        "bytes": rows[0]["bytes"],
        "same top token": _spread([row["same"] for row in rows]),
        "logit error, rms": _spread([row["error"] for row in rows]),
        "logit error, largest": max(row["largest"] for row in rows),
        "perplexity": float(mx.exp(mx.array(nll).mean()).item()),
        "nll": nll,
    }


# ---- hits ----------------------------------------------------------------------------


def hits(loaded: LoadedModel, lengths: list[int], rounds: int) -> Iterator[Json]:
    """All bits in turns, each with an engine of its own, of one model: the same prompt again."""
    cache = {bits: CacheSettings(kv_bits=bits, max_prefix_bytes=4 << 30) for bits in BITS}
    engines = {bits: Engine(loaded, Governor, MemorySettings(), cache[bits]) for bits in BITS}
    for number, length in enumerate(lengths):
        prompt = f"{number} " + "word " * length
        for running in engines.values():
            for _ in range(4):  # a miss, and hits that warm up
                _ask(running, prompt)
        seconds: dict[int, list[tuple[float, float]]] = {bits: [] for bits in BITS}
        for round_ in range(rounds):
            start = round_ % len(BITS)
            for bits in BITS[start:] + BITS[:start]:
                seconds[bits].append(_ask(engines[bits], prompt))
        clock, processor = (
            {
                bits: _spread([1000 * pair[side] for pair in pairs])
                for bits, pairs in seconds.items()
            }
            for side in (0, 1)
        )
        yield {"words": length, "TTFT, ms": clock, "processor, ms": processor}


def _ask(running: Engine, prompt: str) -> tuple[float, float]:
    """Seconds on the clock to the first token, and processor seconds of one request."""
    started = time.process_time()
    asked = running.ask(prompt, max_tokens=1)
    running.wait()
    return running.ttft_ms(asked) / 1000, time.process_time() - started


def _spread(values: Sequence[float]) -> list[float]:
    """Median, least and most."""
    return [round(each, 5) for each in (statistics.median(values), min(values), max(values))]


if __name__ == "__main__":
    main()
