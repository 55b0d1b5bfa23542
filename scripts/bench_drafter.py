"""What a trained drafter brings, if its guesses are right a known share of the time.

An EAGLE-3 head with random weights does all its work; then each of its guesses is replaced by the
token that will be sampled, or, by a seeded coin, by another one. The sampler is scripted with
random tokens, so that nothing else is drafted. Engines without drafts, with steps of each width,
and with the widths that `Speculation` chooses take turns.

Prints JSON: what steps of each width cost, in plain ones; for each share the gain over no drafts,
and the gain that the share allows at the best of the measured widths. Times are those of the
processor, with one thread, and of the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench_speculation import SCRIPTS, ScriptedSampler, new_engine
from measure_memory import preload_openblas

from tests.tiny_models.draft_heads import write_eagle
from vlm_server.engine.loop import EngineLoop
from vlm_server.protocol import Event, Failed, SamplingParams, Submit, Tokens
from vlm_server.runner.decode import decode_batch
from vlm_server.runner.decode.decode_groups import DecodeGroups
from vlm_server.runner.decode.head_drafts import HeadDrafts
from vlm_server.runner.decode.sequence import DecodingSequence
from vlm_server.runner.decode.speculation import (
    DraftByHead,
    DraftChoice,
    Speculation,
    expected_tokens,
)
from vlm_server.runner.device.device import current_device
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.loading.load import load
from vlm_server.settings import ModelSettings

WIDTHS = (2, 3, 4, 8)
MAX_DRAFTS = max(WIDTHS) - 1
PROMPT = "How does it work?"
TOKENS = 1000, 40_000
"""The range of what is sampled, within the vocabulary of `scripts/trained_model`."""
SEED = 1


class Knowing:
    """Drafts by a head, of which each token is right with probability `share`."""

    share = 1.0

    def __init__(self) -> None:
        self._of_head = HeadDrafts._draft
        HeadDrafts._draft = lambda *arguments: self._draft(*arguments)  # also of a batch's rows

    def _draft(
        self,
        own: HeadDrafts,
        head: Any,
        layers: list[Any],
        seqs: Sequence[DecodingSequence],
        newest: Sequence[int],
        count: int,
    ) -> list[list[int]]:
        drafts = self._of_head(own, head, layers, seqs, newest, count)
        script = SCRIPTS[SEED]
        for seq, draft in zip(seqs, drafts, strict=True):
            start = len(seq.token_ids) + 1
            for i, token in enumerate(script[start : start + count]):
                is_right = random.Random(f"{script[0]} {start + i}").random() < self.share
                draft[i] = token if is_right else token + 1
        return drafts


class FixedWidth(Speculation):
    """Drafts of the head in every step, as many as a width takes."""

    def can_gain(self, seqs: Sequence[DecodingSequence]) -> bool:
        return True

    def drafts(
        self,
        seqs: Sequence[DecodingSequence],
        eos_token_ids: frozenset[int],
        draft_by_head: DraftByHead | None = None,
    ) -> DraftChoice:
        assert draft_by_head is not None
        (width,) = self.widths
        drafted = draft_by_head(width - 1)
        return DraftChoice(width, drafted, [True] * len(seqs), by_head=True)


@dataclass(frozen=True)
class Answer:
    """Seconds and tokens per step of an answer, after its first token."""

    processor: float
    clock: float
    tokens_per_step: float

    def gain(self, plain: Answer, clock: str) -> float:
        """Tokens in the time of one without drafts."""
        return float(getattr(plain, clock) / getattr(self, clock) * self.tokens_per_step)


def run(engine: EngineLoop, share: float, script: list[int]) -> Answer:
    """Let the engine write `script` with a drafter of this share."""
    Knowing.share, SCRIPTS[SEED] = share, script
    times: list[tuple[float, float]] = []

    def take(event: Event) -> None:
        assert not isinstance(event, Failed), event
        if isinstance(event, Tokens):
            times.append((time.process_time(), time.perf_counter()))

    engine.scheduler.reset_stats()
    params = SamplingParams(max_tokens=len(script), temperature=0.0, seed=SEED, ignore_eos=True)
    engine.inbox.put(Submit("a", (), (), params, prompt=PROMPT))
    replace(engine, send=take).run_until_idle()
    counts = engine.scheduler.stats()
    num_steps = len(script) - 1 - counts.spec_accepted_tokens
    processor, clock = (times[-1][i] - times[0][i] for i in (0, 1))
    return Answer(processor / num_steps, clock / num_steps, (len(script) - 1) / num_steps)


def engines_of(loaded: LoadedModel, shares: Sequence[float]) -> dict[str, tuple[EngineLoop, float]]:
    """Engines by name, and the share of their drafters."""
    engines = {"plain": (new_engine(loaded, 0), 1.0)}
    for width in WIDTHS:
        engine = new_engine(loaded, width - 1)
        engine.runner._groups = DecodeGroups(loaded, FixedWidth((width,), has_head=True))
        engines[f"{width}"] = engine, 1.0
    return engines | {f"share {share}": (new_engine(loaded, MAX_DRAFTS), share) for share in shares}


def report(rounds: list[dict[str, Answer]], shares: Sequence[float], clock: str) -> None:
    """Print the costs of the widths, and each share's gain."""
    plain = statistics.median(getattr(one["plain"], clock) for one in rounds)
    costs = {
        width: statistics.median(getattr(one[f"{width}"], clock) for one in rounds) / plain
        for width in WIDTHS
    }
    shown = {width: round(cost, 2) for width, cost in costs.items()}
    print(json.dumps({"time": clock, "plain_ms": round(1000 * plain, 1), "costs": shown}))
    for share in shares:
        allowed = {w: expected_tokens([share] * (w - 1)) / cost for w, cost in costs.items()}
        best = max(1.0, *allowed.values())
        name = f"share {share}"
        gains = sorted(one[name].gain(one["plain"], clock) for one in rounds)
        gain = statistics.median(gains)
        result = {
            "share": share,
            "tokens_per_step": round(
                statistics.median(one[name].tokens_per_step for one in rounds), 2
            ),
            "gain": round(gain, 2),
            "spread": [round(gains[0], 2), round(gains[-1], 2)],
            "allowed": round(best, 2),
            "at_width": max(allowed, key=allowed.__getitem__) if best > 1 else 1,
            "part": round(gain / best, 2),
        }
        print(json.dumps(result), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_drafter", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.7, 0.9, 1.0])
    wanted = parser.parse_args()
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    preload_openblas()
    device = current_device()
    with TemporaryDirectory() as folder:
        head = write_eagle(wanted.model, Path(folder, "head"), is_idle=False)
        settings = ModelSettings(path=str(wanted.model), drafter=str(head))
        loaded = load(settings, device, device.suitable_bytes)
    decode_batch.SequenceSampler = ScriptedSampler
    Knowing()
    engines = engines_of(loaded, wanted.shares)
    draw, rounds = random.Random(0), list[dict[str, Answer]]()
    for _ in range(wanted.rounds + 1):
        script = [draw.randrange(*TOKENS) for _ in range(wanted.tokens)]
        turns = draw.sample(sorted(engines.items()), len(engines))
        rounds.append({name: run(*engine, script) for name, engine in turns})
    for clock in ("processor", "clock"):
        report(rounds[1:], wanted.shares, clock)


if __name__ == "__main__":
    main()
