"""`python -m tests.integration.two_ranks FOLDER...`: one of two ranks, told on standard input.

For each checkpoint rank 0 prints what `compare` returns of it, as a line of JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import msgspec
from mlx_vlm.models.cache import make_prompt_cache

from tests.integration.harness import GREEDY, ask, new_preparer, prompt_of
from vlm_server.cache.caches import Caches
from vlm_server.interfaces import NewRequest, PrefillWork, SchedulerOutput, SeqId
from vlm_server.protocol.commands import Rank
from vlm_server.runner.device.device import current_device
from vlm_server.runner.distributed.prefixes import HeldPrefix
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.loading.load import load
from vlm_server.runner.model.compiled_model import CompiledModel
from vlm_server.runner.model.forward_pass import text_inputs
from vlm_server.runner.model_runner import ModelRunner
from vlm_server.runner.ranks import Ranks
from vlm_server.settings import ModelSettings

_LIMIT_BYTES = 1 << 30
_TOKENS = 40
_MIXED_STEP_TOKENS = 24
_CHUNK_TOKENS = 16


class Comparison(msgspec.Struct, frozen=True):
    """Of one checkpoint on two ranks and in one process."""

    name: str
    difference: float
    """The largest difference between the scores of a prompt."""
    largest: float
    """The largest score."""
    whole_tokens: dict[str, list[int]]
    """Each request's tokens in one process without compiled steps."""
    compiled_tokens: dict[str, list[int]]
    """Those on two ranks with compiled steps, one of them mixed; empty if it can't be compiled."""


def main() -> None:
    rank = msgspec.json.decode(sys.stdin.buffer.readline(), type=Rank)
    rank.enter()
    ranks = Ranks.join(rank)
    for folder in sys.argv[1:]:
        comparison = compare(folder, ranks)
        if ranks.leads:
            print(msgspec.json.encode(comparison).decode(), flush=True)


def compare(folder: str, ranks: Ranks) -> Comparison:
    """Load and run the checkpoint in `folder` both ways."""
    settings, device = ModelSettings(path=folder), current_device()
    parted, whole = (load(settings, device, _LIMIT_BYTES, each) for each in (ranks, None))
    parted_scores, whole_scores = scores(parted), scores(whole)
    text = compiled(parted)
    compiled_tokens = answer(replace(parted, text=text))
    is_compiled = text.can_compile and text.max_piggybacked_tokens(1) > 0
    return Comparison(
        Path(folder).name,
        mx.abs(parted_scores - whole_scores).max().item(),  # type: ignore[arg-type]
        mx.abs(whole_scores).max().item(),  # type: ignore[arg-type]
        answer(whole),
        compiled_tokens if is_compiled else {},
    )


def scores(loaded: LoadedModel) -> mx.array:
    """Logits of a prompt's second chunk: (tokens, vocabulary)."""
    token_ids = mx.arange(3, 3 + _TOKENS)[None] % 100
    cache = make_prompt_cache(loaded.language_model)
    half = _TOKENS // 2
    made = [loaded.language_model(part, cache=cache) for part in mx.split(token_ids, 2, axis=1)]
    logits = made[1].logits[0].astype(mx.float32)
    mx.eval(logits)
    assert cache[0].offset == 2 * half
    loaded.forget_positions()
    return logits


def compiled(loaded: LoadedModel) -> CompiledModel:
    embed, arguments = text_inputs(loaded.model), loaded.family.deepstack.arguments
    loaded.forget_positions()
    model, positions = loaded.language_model, loaded.decode_positions
    attention, count = loaded.attention, _MIXED_STEP_TOKENS
    return CompiledModel(model, attention, positions, (4,), arguments, embed, count)


def answer(loaded: LoadedModel) -> dict[str, list[int]]:
    """Run `plans`; returns each request's tokens."""
    runner = ModelRunner(loaded, Caches())
    tokens: dict[str, list[int]] = {}
    for plan in plans(loaded):
        result = runner.launch(plan).result()
        assert result.error is None, result.error
        for seq, added in result.tokens.items():
            tokens.setdefault(seq.request_id, []).extend(added)
        runner.precompile_next()
    return tokens


def plans(loaded: LoadedModel) -> Iterator[SchedulerOutput]:
    """One request that decodes while another one is prefilled, and then both."""
    preparer = new_preparer(loaded)
    long, short = "Count all that you can see here, one after the other.", "What is this?"
    prompts = {
        name: prompt_of(preparer, ask(name, text))
        for name, text in (("first", short), ("second", long))
    }
    decoding: tuple[SeqId, ...] = ()
    for name, prompt in prompts.items():
        new = (NewRequest(name, prompt, GREEDY, HeldPrefix()),)
        for start in range(0, prompt.num_tokens, _CHUNK_TOKENS):
            end = min(start + _CHUNK_TOKENS, prompt.num_tokens)
            work = PrefillWork(name, start, end, end == prompt.num_tokens)
            yield SchedulerOutput(new=new, decode=decoding, prefills=(work,))
            new = ()
        decoding += (SeqId(name, 0),)
        for _ in range(4):
            yield SchedulerOutput(decode=decoding)


if __name__ == "__main__":
    main()
