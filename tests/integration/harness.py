"""A real engine on a tiny model, driven step by step by its test."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any

import numpy as np
from mlx_vlm.utils import should_add_special_tokens
from msgspec import structs
from PIL import Image as PillowImage

from tests.support.engine_loop import ImpatientQueue, step_until
from tests.support.image_files import submitted
from vlm_server import settings
from vlm_server.cache.caches import Caches
from vlm_server.cache.kv_storage import EXACT, KVStorage
from vlm_server.engine.encoding import encode
from vlm_server.engine.inbox import DiskReadDone, InboxMessage, PrepareDone
from vlm_server.engine.loop import EngineLoop
from vlm_server.engine.memory.admission import Admission
from vlm_server.engine.memory.governor import Governor
from vlm_server.engine.output.formats import Formats
from vlm_server.engine.scheduler.config import SchedulerConfig
from vlm_server.engine.scheduler.scheduler import Scheduler
from vlm_server.errors import RequestError
from vlm_server.interfaces import (
    DiskReadWork,
    Encoder,
    EncodeWork,
    Prepared,
    PreparedPrompt,
    PrepareWork,
    SeqId,
    StepResult,
)
from vlm_server.interfaces.model_spec import ModelSpec
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.prompt.grammar.grammar_cache import Grammars
from vlm_server.prompt.grammar.grammar_client import GrammarLimits
from vlm_server.prompt.media.decoders import Decoders
from vlm_server.prompt.preparer import MultimodalPreparer
from vlm_server.protocol import (
    Abort,
    ContentPart,
    Event,
    Failed,
    Finished,
    FinishReason,
    Image,
    ImagePart,
    SamplingParams,
    Submit,
    TextPart,
    TokenLogprob,
    Tokens,
    ToolCallDelta,
    Video,
    VideoPart,
)
from vlm_server.protocol import (
    Message as ChatMessage,
)
from vlm_server.runner.decode.speculation import speculation_of
from vlm_server.runner.device.device import current_device
from vlm_server.runner.embedding_runner import EmbeddingRunner
from vlm_server.runner.encode.encoder import ImageEncoder
from vlm_server.runner.kv.layers import can_store, needs_snapshots
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.loading.load import load
from vlm_server.runner.loading.processors import ModelProcessor
from vlm_server.runner.memory import MlxMemory
from vlm_server.runner.model_runner import LaunchedStep, ModelRunner

Part = str | PillowImage.Image | Image | Video
Served = tuple[LoadedModel, MultimodalPreparer]
"""A loaded tiny model, and a preparer for it."""
Load = Callable[[str], Served]
"""Loads the tiny model of a family."""
Turns = tuple[tuple[str, tuple[Part, ...]], ...]
"""The turns of a `conversation`: role and parts of each."""
_CACHE_BYTES = 64 << 20
"""More than any test stores."""
GREEDY = SamplingParams(max_tokens=10, temperature=0.0)


def caches_of(served: Served, kv_storage: KVStorage = EXACT, **sizes: int) -> Caches:
    """Caches for a model, large ones unless `sizes` says otherwise."""
    names = ["token_layout_bytes", "pixel_bytes", "encoder_bytes", "vector_bytes"]
    writes = served[0].spec.writes
    names += ["prefix_bytes"] if writes and can_store(served[0].language_model) else []
    all_sizes = dict.fromkeys(names, _CACHE_BYTES) | sizes
    has_snapshots = writes and needs_snapshots(served[0].language_model)
    return Caches(**all_sizes, needs_snapshots=has_snapshots, kv_storage=kv_storage)


def video_of(data: bytes, name: str = "MP4") -> Video:
    """A video as the front hands it over."""
    return Video(data, hashlib.sha256(data).hexdigest(), name, "messages[0]")


def ask(request_id: str, *parts: Part, sampling: SamplingParams = GREEDY) -> Submit:
    """One user message of texts and images, in this order."""
    return conversation(request_id, ("user", parts), sampling=sampling)


def conversation(
    request_id: str, *turns: tuple[str, Sequence[Part]], sampling: SamplingParams = GREEDY
) -> Submit:
    """Messages of (role, parts)."""
    images: list[Image] = []
    videos: list[Video] = []

    def part_of(part: Part) -> ContentPart:
        if isinstance(part, str):
            return TextPart(part)
        if isinstance(part, Video):
            videos.append(part)
            return VideoPart(len(videos) - 1)
        images.append(part if isinstance(part, Image) else submitted(part))
        return ImagePart(len(images) - 1)

    messages = tuple(
        ChatMessage(role, tuple(map(part_of, parts)))  # type: ignore[arg-type]
        for role, parts in turns
    )
    return Submit(request_id, messages, tuple(images), sampling, tuple(videos))


def for_mlx_vlm(loaded: LoadedModel, rendered: str, *, has_images: bool) -> str:
    """A rendered prompt without the BOS that mlx-vlm adds once more."""
    if has_images:
        adds_bos = _adds_bos_to_images(loaded)
    else:
        adds_bos = should_add_special_tokens(loaded.family.name, loaded.processor) and (
            loaded.spec.tokenizer("a")["input_ids"][0] == loaded.spec.tokenizer.bos_token_id
        )
    return rendered.removeprefix(loaded.spec.tokenizer.bos_token or "") if adds_bos else rendered


def by_own_template(loaded: LoadedModel, messages: list[dict[str, Any]]) -> str:
    """A prompt rendered by our template of a family whose checkpoints have none."""
    return str(
        loaded.spec.tokenizer.apply_chat_template(
            messages,
            chat_template=loaded.family.chat_template,
            tokenize=False,
            add_generation_prompt=True,
        )
    )


def _adds_bos_to_images(loaded: LoadedModel) -> bool:
    """Whether mlx-vlm's processor writes a BOS before a prompt with images."""
    host = loaded.spec
    processor = ModelProcessor(loaded.processor, host.image_token_id, host.stand_in)
    placeholder = next(filter(processor.expands, host.image_placeholders))
    made = processor.image(np.zeros((64, 64, 3), dtype=np.uint8), placeholder)
    return int(made.token_ids[0]) == host.tokenizer.bos_token_id


def load_model(
    folder: Path | str,
    limit_bytes: int | None = None,
    adapters: Mapping[str, str] = MappingProxyType({}),
    **options: Any,
) -> LoadedModel:
    """The checkpoint in `folder` on MLX's default device; `options` are further settings."""
    device = current_device()
    limit = device.memory_bytes if limit_bytes is None else limit_bytes
    model = settings.ModelSettings(path=str(folder), **options)
    return load(model, device, limit, adapters=adapters)


DECODERS = Decoders(settings.ImageSettings(), settings.VideoSettings(), 2)
"""Those of all tests: starting a process takes a while."""


def new_grammars(
    host: ModelSpec,
    compile_seconds: float = 60.0,
    follow_seconds: float = 60.0,
    cache_bytes: int = 128 << 20,
) -> Grammars:
    """Grammars with generous limits, as the machine may be busy."""
    limits = GrammarLimits(
        compile_seconds, settings.EngineSettings().max_schema_memory_bytes, follow_seconds
    )
    return Grammars(host, limits, cache_bytes)


def new_preparer(
    loaded: LoadedModel,
    decoders: Decoders = DECODERS,
    grammars: Grammars | None = None,
    caches: Caches | None = None,
) -> MultimodalPreparer:
    """A preparer with the default settings, without caches unless they are given."""
    grammars = grammars or new_grammars(loaded.spec)
    return MultimodalPreparer(loaded.spec, decoders, grammars, caches or Caches())


def prepare(preparer: MultimodalPreparer, submit: Submit) -> Prepared:
    """Prepare a request without cancellation."""
    return preparer.prepare(submit, Cancellation())


def prompt_of(preparer: MultimodalPreparer, submit: Submit) -> PreparedPrompt:
    """The prompt of a request; its cache references are released."""
    prepared = prepare(preparer, submit)
    prepared.references.release()
    return prepared.prompt


def encode_works(preparer: MultimodalPreparer, submit: Submit) -> list[EncodeWork]:
    """The encode work of a request."""
    prepared = prepare(preparer, submit)
    prepared.references.release()
    inputs = sorted(prepared.inputs.items())
    return [EncodeWork(submit.request_id, index, prepared.prompt, each) for index, each in inputs]


@dataclass
class InlinePreparers:
    """Prepares requests on the loop's own thread."""

    preparer: MultimodalPreparer
    inbox: SimpleQueue[InboxMessage]
    num_tracked = 0
    prompts: dict[str, PreparedPrompt] = field(default_factory=dict)
    num_uncached_spans: dict[str, int] = field(default_factory=dict)
    """How many spans of each prompt were not in its prefix in memory or on disk."""
    num_read: dict[str, int] = field(default_factory=dict)
    """How many of those no cache had features of, so that pixels were made."""
    outcomes: dict[str, Prepared] = field(default_factory=dict)
    """What some requests get instead of what the preparer would make of them."""

    def start(self, work: PrepareWork) -> None:
        outcome: Prepared | RequestError
        name = work.submit.request_id
        try:
            outcome = self.outcomes.pop(name, None) or self.preparer.prepare(
                work.submit, work.cancellation, use_disk=work.use_disk
            )
        except RequestError as error:
            outcome = error
        else:
            prompt, length = outcome.prompt, outcome.references.num_cached_tokens
            length = max(length, outcome.disk_read.prefix_tokens if outcome.disk_read else 0)
            self.prompts[name], self.num_read[name] = prompt, len(outcome.inputs)
            self.num_uncached_spans[name] = sum(span.start >= length for span in prompt.spans)
        self.inbox.put(PrepareDone(name, outcome))


@dataclass
class InlineDiskReader:
    """Reads on the loop's own thread; the real disk reader has one of its own."""

    caches: Caches
    inbox: SimpleQueue[InboxMessage]
    works: list[DiskReadWork] = field(default_factory=list)

    def start(self, work: DiskReadWork) -> None:
        self.works.append(work)
        loaded = self.caches.read_disk(work.disk_read, lambda: work.cancellation.is_cancelled)
        self.inbox.put(DiskReadDone(work.request_id, loaded))


@dataclass
class InlineEncoder:
    """Encodes on the loop's own thread; the real encoder has one of its own."""

    encoder: Encoder
    inbox: SimpleQueue[InboxMessage]
    seconds: float | None = None
    """What each call is said to have taken, if not what it took."""
    has_parts_left = False

    def advance_encode(self, *, is_alone: bool) -> None:
        pass

    def start(self, works: Sequence[EncodeWork]) -> None:
        done = encode(self.encoder, works)
        self.inbox.put(done if self.seconds is None else replace(done, seconds=self.seconds))


class RecordingRunner(ModelRunner):
    """Notes all tokens of each sequence in `tokens`, and how many prompts each chunk was of."""

    def __init__(self, loaded: LoadedModel, caches: Caches, num_draft_tokens: int) -> None:
        super().__init__(loaded, caches, speculation_of(loaded, num_draft_tokens))
        self.tokens: dict[SeqId, list[int]] = {}
        self.prompts_at_once: list[int] = []
        self.prefill_seconds: float | None = None
        """What each chunk is said to have taken, if not what it took."""

    def finish(self, step: LaunchedStep) -> StepResult:
        result = super().finish(step)
        if step.plan.prefills:
            self.prompts_at_once.append(len(step.plan.prefills))
        if self.prefill_seconds is not None:
            result = replace(result, prefill_seconds=self.prefill_seconds)
        for seq, tokens in result.tokens.items():
            self.tokens.setdefault(seq, []).extend(tokens)
        return result


class AmpleProcess:
    """The `ProcessMemory` of tests."""

    def footprint_bytes(self) -> int:
        return 0

    def trim(self) -> None:
        pass


@dataclass
class EngineHarness:
    """The real loop on one thread: scheduler, runner, encoder and preparer of one model."""

    loaded: LoadedModel
    preparer: MultimodalPreparer
    chunk_tokens: int = 512
    max_num_seqs: int = 8
    num_draft_tokens: int = 0
    max_images_per_encode: int = 1
    max_prompts_per_prefill: int = 1
    max_inner_points: int = 0
    caches: Caches = field(default_factory=Caches)
    """If they store anything, the harness has a preparer of its own, which uses them, too."""
    seq_texts: dict[SeqId, str] = field(default_factory=dict)
    """The text of each choice without its reasoning."""
    seq_calls: dict[SeqId, list[ToolCallDelta]] = field(default_factory=dict)
    """The tool calls of each choice, each call as one delta."""
    logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    finish_reasons: dict[SeqId, FinishReason] = field(default_factory=dict)
    ends: dict[str, Finished | Failed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(reading.limit_bytes for reading in self.caches.stats()):
            self.preparer = new_preparer(self.loaded, caches=self.caches)
        self.runner: Any = (
            RecordingRunner(self.loaded, self.caches, self.num_draft_tokens)
            if self.loaded.family.embeds is None
            else EmbeddingRunner(self.loaded)
        )
        config = SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            prefill_chunk_tokens=self.chunk_tokens,
            max_step_seconds=60.0,
            max_preparing=8,
            context_tokens=self.loaded.spec.context_tokens,
            vocabulary_size=self.loaded.spec.vocabulary_size,
            eos_token_ids=self.loaded.spec.eos_token_ids,
            default_sampling=self.loaded.default_sampling,
            formats=Formats.of_model(self.loaded.spec),
            max_images_per_encode=self.max_images_per_encode,
            max_prompts_per_prefill=self.max_prompts_per_prefill,
            max_inner_points=self.max_inner_points,
            family=self.loaded.spec.family,
            writes=self.loaded.spec.writes,
            batches_options=self.loaded.spec.can_batch,
            vectors=self.loaded.spec.vectors,
            scores_pairs=self.loaded.spec.scores is not None,
            batches_lengths=self.loaded.family.embeds is None
            or self.loaded.family.embeds.batches_lengths,
        )
        governor = Governor(
            settings.MemorySettings(),
            MlxMemory(settings.MemorySettings(), self.loaded.device),
            AmpleProcess(),
            self.caches,
        )
        admission = Admission(governor, self.runner.kv_bytes, self.chunk_tokens)
        self.scheduler = Scheduler(
            config,
            self.loaded.spec.backend,
            self.caches,
            admission,
            self.preparer.pixels_to_decode,
            self.runner.max_piggybacked_tokens,
        )
        self.inbox = ImpatientQueue()
        self.preparers = InlinePreparers(self.preparer, self.inbox)
        self.disk_reader = InlineDiskReader(self.caches, self.inbox)
        self.encoder = InlineEncoder(ImageEncoder(self.loaded, self.caches.tiles), self.inbox)
        self.loop = EngineLoop(
            self.inbox,
            self.scheduler,
            self.runner,
            self.preparers,
            self.disk_reader,
            self.encoder,
            governor,
            self._take,
            max_failed_steps=1000,
        )

    @property
    def prompts(self) -> dict[str, PreparedPrompt]:
        return self.preparers.prompts

    @property
    def seqs(self) -> dict[SeqId, list[int]]:
        """All tokens of each choice."""
        return self.runner.tokens

    @property
    def tokens(self) -> dict[str, list[int]]:
        """All tokens of each request's first choice."""
        return {seq.request_id: tokens for seq, tokens in self.seqs.items() if not seq.choice}

    @property
    def texts(self) -> dict[str, str]:
        """All the text of each request's first choice."""
        return {seq.request_id: text for seq, text in self.seq_texts.items() if not seq.choice}

    @property
    def num_tracked(self) -> int:
        return self.scheduler.stats().tracked + self.runner.num_tracked

    def add(self, submit: Submit) -> None:
        """Add a request, to be prepared with the next step."""
        self.inbox.put(submit)

    def abort(self, request_id: str) -> None:
        self.inbox.put(Abort(request_id))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.loop.step()

    def step_until(self, condition: Callable[[], bool]) -> None:
        step_until(self.step, condition)

    def run(self) -> None:
        """Run every request to its end, after which no state is left."""
        self.loop.run_until_idle()
        assert self.num_tracked == 0

    def finish(self, submit: Submit) -> Finished:
        """Run a request with all others to the end; returns its own."""
        self.add(submit)
        self.run()
        end = self.ends[submit.request_id]
        assert isinstance(end, Finished), end
        return end

    def failure(self, submit: Submit) -> Failed:
        """Run a request that fails, with all others, to the end; returns its error."""
        self.add(submit)
        self.run()
        end = self.ends[submit.request_id]
        assert isinstance(end, Failed), end
        return end

    def answer(self, submit: Submit) -> list[int]:
        """Run a request with all others to the end; returns its tokens."""
        self.finish(submit)
        return self.tokens[submit.request_id]

    @staticmethod
    def _take_call(calls: list[ToolCallDelta], delta: ToolCallDelta) -> None:
        if delta.index == len(calls):
            assert delta.id
            assert delta.name
            calls.append(delta)
        else:
            assert (delta.index, delta.id, delta.name) == (len(calls) - 1, "", "")
            arguments = calls[-1].arguments + delta.arguments
            calls[-1] = structs.replace(calls[-1], arguments=arguments)

    def _take(self, event: Event) -> None:
        match event:
            case Tokens(deltas):
                for delta in deltas:
                    seq = SeqId(delta.request_id, delta.choice)
                    text = "" if delta.is_reasoning else delta.text
                    self.seq_texts[seq] = self.seq_texts.get(seq, "") + text
                    if delta.tool_call:
                        self._take_call(self.seq_calls.setdefault(seq, []), delta.tool_call)
                    if delta.finish_reason:
                        self.finish_reasons[seq] = delta.finish_reason
                    self.logprobs.setdefault(delta.request_id, []).extend(delta.logprobs)
            case Finished() | Failed():
                assert event.request_id not in self.ends
                self.ends[event.request_id] = event
            case _:
                pass


NewEngine = Callable[..., EngineHarness]


def cached_tokens(engine: EngineHarness, request_id: str) -> int:
    """The number of cached tokens of a request that has ended."""
    return engine.ends[request_id].usage.cached_tokens
