"""From a `Start` command to an engine that is ready. Knows the order of starting; no socket."""

from __future__ import annotations

import gc

from vlm_server.cache.caches import Caches
from vlm_server.engine.loop import EngineLoop
from vlm_server.engine.memory.admission import Admission
from vlm_server.engine.memory.governor import Governor
from vlm_server.engine.scheduling.limits import SchedulerConfig
from vlm_server.engine.scheduling.scheduler import Scheduler
from vlm_server.prompt.grammar import Grammars
from vlm_server.prompt.preparer import MultimodalPreparer
from vlm_server.protocol import Loading, Ready, Start
from vlm_server.runner.device.device import current_device
from vlm_server.runner.device.memory import MlxMemory, make_caches
from vlm_server.runner.device.speed import warn_of_slow_products
from vlm_server.runner.kv.disk_tier import open_disk_cache
from vlm_server.runner.model.load import LoadedModel, load
from vlm_server.runner.model_runner import ModelRunner
from vlm_server.runner.vision.encoder import ImageEncoder
from vlm_server.worker.channel import Channel
from vlm_server.worker.warm_up import stages, warm_up


def start_engine(start: Start, channel: Channel) -> tuple[EngineLoop, Caches]:
    """Load, warm up and say `Ready`. Raises ModelLoadError."""
    channel.send(Loading("loading the weights", 0.1))
    device = current_device()
    loaded = load(start.model, device)
    memory = MlxMemory(start.memory, device)
    caches = make_caches(start.cache, memory, loaded.language_model)
    loop = build_loop(start, loaded, memory, caches, channel)
    for number, stage in enumerate(stages(with_video=loaded.host.video_token_id is not None)):
        channel.send(Loading(f"warming up on {stage.name}", 0.5 + 0.1 * number))
        warm_up(loop, stage)
    loop.reset_stats()
    caches.disk = open_disk_cache(start.cache, loaded.host.fingerprint, caches.prefixes, device)
    loop.send = channel.send
    warn_of_slow_products(device)
    gc.collect()
    gc.freeze()  # else each full collection goes through all of it: 30 ms in somebody's answer
    channel.send(Ready(loaded.family.name, device.name, loaded.host.context_tokens))
    return loop, caches


def build_loop(
    start: Start, loaded: LoadedModel, memory: MlxMemory, caches: Caches, channel: Channel
) -> EngineLoop:
    """The engine around a loaded model."""
    config = SchedulerConfig(
        max_num_seqs=start.scheduler.max_num_seqs,
        prefill_chunk_tokens=start.scheduler.prefill_chunk_tokens,
        max_step_seconds=start.scheduler.max_step_seconds,
        max_preparing=start.scheduler.preparer_threads,
        context_tokens=loaded.host.context_tokens,
        vocabulary_size=loaded.host.vocabulary_size,
        eos_token_ids=loaded.host.eos_token_ids,
        default_temperature=loaded.default_temperature,
        default_top_p=loaded.default_top_p,
    )
    grammars = Grammars(loaded.host, start.engine.schema_timeout_seconds)
    governor, runner = Governor(start.memory, memory, caches), ModelRunner(loaded, caches)
    admission = Admission(governor, runner.kv_bytes, config.prefill_chunk_tokens)
    return EngineLoop(
        inbox=channel.inbox,
        scheduler=Scheduler(config, loaded.host.backend, caches, admission),
        runner=runner,
        preparer=MultimodalPreparer(loaded.host, start.video, grammars, caches),
        encoder=ImageEncoder(loaded),
        governor=governor,
        send=channel.send,
        preparer_threads=start.scheduler.preparer_threads,
        max_failed_steps=start.engine.max_failed_steps,
    )
