"""The start of an engine: from a `Start` command to `Ready`."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vlm_server.cache.caches import Caches
from vlm_server.engine.channel import Channel
from vlm_server.engine.encoding import EncoderInTurns
from vlm_server.engine.inbox import Inbox
from vlm_server.engine.loop import EngineLoop
from vlm_server.engine.memory.admission import Admission
from vlm_server.engine.memory.governor import Governor
from vlm_server.engine.output.formats import Formats
from vlm_server.engine.scheduler.config import TYPICAL_TOKENS, SchedulerConfig, suitable_num_seqs
from vlm_server.engine.scheduler.scheduler import Scheduler
from vlm_server.engine.threads import DiskReaderThread, EncoderThread, PreparerThreads
from vlm_server.engine.warm_up import WarmUpRecord, pooling_stages, stages, warm_up
from vlm_server.errors import ModelLoadError
from vlm_server.interfaces import EncodeExecutor, Runner
from vlm_server.platform import machine
from vlm_server.platform.footprint import SystemProcessMemory
from vlm_server.prompt.grammar.grammar_cache import Grammars
from vlm_server.prompt.grammar.grammar_client import GrammarLimits
from vlm_server.prompt.media.decoders import Decoders
from vlm_server.prompt.preparer import MultimodalPreparer
from vlm_server.protocol import Event, Loading, Ready, Start
from vlm_server.runner.caches import build_caches
from vlm_server.runner.device.device import current_device, warn_of_slow_products
from vlm_server.runner.distributed.rank_zero import RankZero, SingleProcess
from vlm_server.runner.encode.encoder import ImageEncoder
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.loading.facts import model_facts
from vlm_server.runner.loading.probe import planned_state_size
from vlm_server.runner.prefill.batched_prefill import can_batch_prefills
from vlm_server.sizes import memory_size

logger = logging.getLogger(__name__)

_PRECOMPILE_SECONDS = 0.5
"""Time before ready for the likeliest shapes, some 30 ms each, on devices with compiled steps."""

MIN_REQUEST_TOKENS = 1024
"""Tokens of the shortest request that must fit into memory, with its answer."""


def start_engine(start: Start, channel: Channel) -> tuple[EngineLoop, Caches]:
    """Load, warm up and send `Ready`. Raises ModelLoadError.

    The first start of a model on a machine compiles its kernels; later ones find them on disk, and
    only check that the model answers. Further shapes are compiled while the engine is idle.
    """
    started_at = time.monotonic()
    device = current_device()
    if start.rank is not None:
        channel.send(Loading("waiting for the other ranks", 0.0))
    group = SingleProcess() if start.rank is None else RankZero.connect(start.rank, device)
    channel.send(Loading("loading the weights", 0.1))
    start = group.harmonize_settings(start, device)
    memory = group.memory(start.memory, device)
    loaded = group.load(start, device, memory.limit_bytes)
    caches = build_caches(start.cache, memory.read(), loaded)
    loaded = replace(loaded, kv_storage=caches.kv_storage.running)
    governor = Governor(start.memory, memory, SystemProcessMemory(), caches)
    loop = build_engine(start, loaded, governor, caches, channel.inbox, channel.send, group)
    spec = loaded.spec
    record = WarmUpRecord(start.model, device.name)
    needs_more = loaded.backend.compiles_kernels or not loaded.family.is_checked
    warm_up_stages = (
        pooling_stages(with_image=spec.reads_images, scores=spec.vectors is None)
        if not spec.writes
        else stages(
            is_thorough=needs_more and not record.exists(),
            compiles=loaded.backend.compiles_kernels,
            with_image=spec.reads_images,
            with_video=spec.video_token_id is not None,
            context_tokens=spec.context_tokens,
        )
    )
    loaded_at = time.monotonic()
    have_answered = True
    for number, stage in enumerate(warm_up_stages):
        channel.send(
            Loading(f"warming up on {stage.name}", 0.5 + 0.5 * number / len(warm_up_stages))
        )
        have_answered &= warm_up(loop, stage)
    if have_answered:
        record.write()
    _precompile(loop.runner)
    end_warm_up(loop, caches)
    _check_room(loop, spec.context_tokens)
    if loaded.backend.uses_blas:
        warn_of_slow_products()
    gc.collect()
    gc.freeze()  # a full collection would take 30 ms during an answer
    ready_at = time.monotonic()
    logger.debug(
        "started in %.1f s: loaded in %.1f s, warmed up in %.1f s",
        ready_at - started_at,
        loaded_at - started_at,
        ready_at - loaded_at,
    )
    loop.send_stats()  # before `Ready`, so that the greeting knows the memory limit
    facts = model_facts(loaded, Path(start.model.path))
    channel.send(Ready(loaded.family.name, device.name, spec.context_tokens, facts))
    return loop, caches


def end_warm_up(loop: EngineLoop, caches: Caches) -> None:
    """Clear caches, counters and MLX's memory pool of the warm-up."""
    loop.scheduler.reset_stats()
    caches.begin_serving()
    loop.governor.reset_stats()


def _check_room(loop: EngineLoop, context_tokens: int) -> None:
    """Raises ModelLoadError if the model leaves no room for even a short request."""
    num_tokens = min(MIN_REQUEST_TOKENS, context_tokens)
    needed_bytes, free_bytes = loop.runner.kv_bytes(num_tokens), loop.governor.bytes_for_requests
    if needed_bytes > free_bytes:
        raise ModelLoadError(
            f"the model leaves no room for requests: {memory_size(needed_bytes)} are needed for "
            f"{num_tokens} tokens, and it leaves {memory_size(free_bytes)} of memory.max_bytes: "
            "raise that, or serve a smaller or a quantized checkpoint"
        )


def _precompile(runner: Runner) -> None:
    """Compile the likeliest shapes; the others follow while the engine is idle."""
    deadline = time.monotonic() + _PRECOMPILE_SECONDS
    while time.monotonic() < deadline and runner.precompile_next():
        pass


def build_engine(
    start: Start,
    loaded: LoadedModel,
    governor: Governor,
    caches: Caches,
    inbox: Inbox,
    send: Callable[[Event], None],
    group: SingleProcess | None = None,
) -> EngineLoop:
    """Build the engine around a loaded model, with its threads; `send` gets its events."""
    num_preparers = start.scheduler.preparer_threads or _suitable_num_preparers()
    config = SchedulerConfig(
        max_num_seqs=_max_num_seqs(start, loaded, governor),
        prefill_chunk_tokens=start.scheduler.prefill_chunk_tokens,
        max_step_seconds=start.scheduler.max_step_seconds,
        max_preparing=num_preparers,
        context_tokens=loaded.spec.context_tokens,
        vocabulary_size=loaded.spec.vocabulary_size,
        eos_token_ids=loaded.spec.eos_token_ids,
        default_sampling=loaded.default_sampling,
        formats=Formats.of_model(loaded.spec),
        max_images_per_encode=(
            start.scheduler.max_images_per_encode if loaded.family.takes_several else 1
        ),
        encodes_in_turns=loaded.backend.encodes_in_turns,
        max_inner_points=loaded.text.max_inner_points,
        max_prompts_per_prefill=(
            start.scheduler.max_prompts_per_prefill if can_batch_prefills(loaded) else 1
        ),
        family=loaded.spec.family,
        writes=loaded.spec.writes,
        batches_options=loaded.spec.can_batch,
        vectors=loaded.spec.vectors,
        scores_pairs=loaded.spec.scores is not None,
        batches_lengths=loaded.family.embeds is None or loaded.family.embeds.batches_lengths,
    )
    grammars = Grammars(loaded.spec, _grammar_limits(start), start.cache.max_grammar_bytes)
    grammars.warm_up()
    runner = (group or SingleProcess()).runner(
        loaded, caches, start.scheduler.num_speculative_tokens
    )
    admission = Admission(governor, runner.kv_bytes, config.prefill_chunk_tokens)
    decoders = Decoders(start.image, start.video, max(num_preparers, 2))
    preparer = MultimodalPreparer(loaded.spec, decoders, grammars, caches)
    return EngineLoop(
        inbox=inbox,
        scheduler=Scheduler(
            config,
            loaded.spec.backend,
            caches,
            admission,
            preparer.pixels_to_decode,
            runner.max_piggybacked_tokens,
        ),
        runner=runner,
        preparers=PreparerThreads(preparer, inbox, num_preparers),
        disk_reader=DiskReaderThread(caches, inbox),
        encoder=_encoder(loaded, caches, inbox),
        governor=governor,
        send=send,
        max_failed_steps=start.engine.max_failed_steps,
    )


def _encoder(loaded: LoadedModel, caches: Caches, inbox: Inbox) -> EncodeExecutor:
    encoder = ImageEncoder(loaded, caches.tiles)
    in_turns = loaded.backend.encodes_in_turns
    return EncoderInTurns(encoder, inbox) if in_turns else EncoderThread(encoder, inbox)


def _max_num_seqs(start: Start, loaded: LoadedModel, governor: Governor) -> int:
    if not loaded.spec.can_batch:
        return 1
    return start.scheduler.max_num_seqs or _suitable_num_seqs(loaded, governor)


def _suitable_num_seqs(loaded: LoadedModel, governor: Governor) -> int:
    """The number of typical sequences that fit into the memory that the weights leave.

    The fewest for a model that embeds, which keeps none.
    """
    if loaded.family.embeds is not None:
        return suitable_num_seqs(0, 0)
    memory = governor.stats()
    size = planned_state_size(loaded.language_model, loaded.drafter, loaded.kv_storage)
    seq_bytes = size.bytes_for(min(TYPICAL_TOKENS, loaded.spec.context_tokens))
    suitable = suitable_num_seqs(memory.limit_bytes - memory.active_bytes, seq_bytes)
    logger.debug("at most %d sequences decode in one batch (scheduler.max_num_seqs)", suitable)
    return suitable


def _suitable_num_preparers() -> int:
    """The number of preparer threads of each kind that leaves most processors to the device's."""
    return min(max(machine.num_cpus() // 4, 2), 4)


def _grammar_limits(start: Start) -> GrammarLimits:
    return GrammarLimits(
        compile_seconds=start.engine.schema_timeout_seconds,
        memory_bytes=start.engine.max_schema_memory_bytes,
        follow_seconds=start.engine.max_schema_cpu_seconds,
    )
