"""A runner, a preparer and a decoder that obey the ports, without a model.

What the fake model answers depends on the prompt and the choice alone, so that a test can tell
what a request must get whatever runs beside it. The runner checks every plan and reports one step
late, like the real one: a token is reported by the step after the one that drew it.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from tests.unit.cache.fakes import FakeSource, parts_in
from tests.unit.cache.prompts import is_boundary, parts_of
from vlm_server.cache.caches import Caches
from vlm_server.cache.prompt_key import MediaSpan, PromptKey
from vlm_server.cache.references import CacheReferences
from vlm_server.engine.scheduler.config import SchedulerConfig
from vlm_server.errors import InternalError, InvalidRequest, RequestError
from vlm_server.interfaces import (
    EncodeWork,
    MediaInputs,
    MemoryReading,
    NewRequest,
    PrefillWork,
    Prepared,
    PreparedPrompt,
    SchedulerOutput,
    SeqId,
    StepResult,
)
from vlm_server.interfaces.prompts import MAX_INNER_TOKENS
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.protocol import (
    Delta,
    Event,
    Image,
    ImagePart,
    Message,
    SamplingParams,
    Submit,
    TextPart,
    Tokens,
)

EOS = 256
SPECIAL = 257
IMAGE_TOKEN = 258
TOKENS_PER_IMAGE = 4


class ByteDecoder:
    """Ids below 256 are bytes of UTF-8; the others are special."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        shown = [i if i < 256 else ord("#") for i in ids if i < 256 or not skip_special_tokens]
        return bytes(shown).decode("utf-8", errors="replace")

    def id_to_token(self, id: int) -> str | None:
        return f"token {id}" if 0 <= id <= IMAGE_TOKEN else None


class MarkDecoder(ByteDecoder):
    """A `ByteDecoder` with control tokens, from `FIRST` on, that have texts of their own."""

    FIRST = IMAGE_TOKEN + 1

    def __init__(self, *marks: str) -> None:
        self._marks = marks

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        text = b""
        for token_id in ids:
            if token_id < self.FIRST:
                text += (
                    bytes([token_id]) if token_id < 256 else b"" if skip_special_tokens else b"#"
                )
            elif not skip_special_tokens:
                text += self._marks[token_id - self.FIRST].encode()
        return text.decode("utf-8", errors="replace")

    def id_to_token(self, id: int) -> str | None:
        return "a mark" if 0 <= id - self.FIRST < len(self._marks) else super().id_to_token(id)

    def encode(self, text: str) -> list[int]:
        """A token for each mark, and one for each byte of the rest."""
        pieces = re.split("(" + "|".join(map(re.escape, self._marks)) + ")", text)
        ids = list[int]()
        for number, piece in enumerate(pieces):
            ids += [self.FIRST + self._marks.index(piece)] if number % 2 else piece.encode()
        return ids


_MAX_INNER_POINTS = 2


def config(**changes: object) -> SchedulerConfig:
    """Small limits; `changes` replace single ones."""
    values: dict[str, object] = {
        "max_num_seqs": 3,
        "prefill_chunk_tokens": 5,
        "max_step_seconds": 1.0,
        "max_inner_points": _MAX_INNER_POINTS,
        "max_preparing": 2,
        "context_tokens": 200,
        "vocabulary_size": 259,
        "eos_token_ids": frozenset({EOS}),
        "default_sampling": SamplingParams(
            temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0
        ),
    }
    return SchedulerConfig(**(values | changes))  # type: ignore[arg-type]


def submit(request_id: str, text: str = "hello", images: int = 0, **sampling: object) -> Submit:
    """A user's message: as many images as `images` says, then `text`."""
    encoded_images = tuple(
        Image(b"", f"{request_id}-{n}", "PNG", 8, 8, f"messages[0].content[{n}]")
        for n in range(images)
    )
    parts = (*map(ImagePart, range(images)), TextPart(text))
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return Submit(request_id, (Message("user", parts),), encoded_images, params)


def prompt(text: str = "hello", images: int = 0) -> PreparedPrompt:
    """The prompt that `FakePreparer` makes of `submit(..., text, images)`."""
    size = TOKENS_PER_IMAGE
    ids = [IMAGE_TOKEN] * (size * images) + list(text.encode())
    spans = tuple(MediaSpan(size * n, size * (n + 1), f"{n}") for n in range(images))
    return PreparedPrompt(np.array(ids, dtype=np.int32), spans)


def prepared(
    prepared_prompt: PreparedPrompt, caches: Caches | None = None, *, use_disk: bool = True
) -> Prepared:
    """A prompt with the entries that `caches` have of it, and pixels for the rest."""
    caches = Caches() if caches is None else caches
    holds = CacheReferences(
        caches,
        prepared_prompt.key,
        prepared_prompt.cache_salt,
        prepared_prompt.atomic_prefill_tokens,
    )
    inputs: dict[int, MediaInputs] = {}
    load = holds.look_up(on_disk=use_disk)
    for index in list(holds.missing_spans()):
        if load is None or not load.covers(index):
            inputs[index] = {"pixel_values": np.zeros((1, 2), np.float32)}
    return Prepared(prepared_prompt, holds, inputs, load)


def answer_tokens(prepared_prompt: PreparedPrompt, choice: int = 0) -> list[int]:
    """The fake model's answer to a prompt: up to 12 characters of 1 to 4 bytes, then EOS."""
    shown = "".join(span.mm_hash for span in prepared_prompt.spans).encode()
    digest = hashlib.sha256(prepared_prompt.token_ids.tobytes() + shown + bytes(choice)).digest()
    characters = ["abcdefghijklmnop é€😀"[byte % 19] for byte in digest[1 : 2 + digest[0] % 12]]
    return [*"".join(characters).encode(), EOS]


def answer_text(prepared_prompt: PreparedPrompt, max_tokens: int = 1000, choice: int = 0) -> str:
    """The text of the first `max_tokens` tokens of the answer."""
    return ByteDecoder().decode(answer_tokens(prepared_prompt, choice)[:max_tokens])


@dataclass
class _Prefill:
    request: NewRequest
    num_prefilled: int
    snapshots: set[int] = field(default_factory=set)
    """The snapshot points passed so far."""


@dataclass
class _Sequence:
    prompt: PreparedPrompt
    answer: list[int]
    reported_ids: list[int] = field(default_factory=list)
    """The first token is drawn when the sequence joins, and reported with the next step."""

    def next_token(self) -> int:
        """The token drawn last, once the next one is launched."""
        past = len(self.reported_ids)
        self.reported_ids.append(self.answer[past] if past < len(self.answer) else ord("!"))
        return self.reported_ids[-1]


@dataclass
class FakeStep:
    runner: FakeRunner
    brings: StepResult

    def result(self) -> StepResult:
        assert self.runner.is_launched, "a result is read once"
        self.runner.is_launched = False
        return self.brings


@dataclass
class FakeRunner:
    """A `Runner` that refuses every plan that the real one could not carry out."""

    max_num_seqs: int
    chunk_tokens: int
    failing_prefills: set[str] = field(default_factory=set)
    """Requests whose next chunk fails."""
    chunk_errors: dict[str, list[RequestError]] = field(default_factory=dict)
    """By request, what its next chunks fail with, one after the other."""
    failures: dict[str, RequestError] = field(default_factory=dict)
    """Requests whose sequences fail in the next step."""
    prefill_seconds: Callable[[SchedulerOutput], float] = lambda plan: 0.0
    """The reported seconds of a prefill."""
    mixed_step_tokens: int = 0
    """See `Device`."""
    fails_decode: bool = False
    """Whether the next decode step fails."""
    answer: Callable[[PreparedPrompt, int], list[int]] = answer_tokens
    """The answer to a prompt, by choice."""
    plans: list[SchedulerOutput] = field(default_factory=list)
    prefills: dict[str, _Prefill] = field(default_factory=dict)
    seqs: dict[SeqId, _Sequence] = field(default_factory=dict)
    caches: Caches = field(default_factory=Caches)
    joined: dict[str, _Prefill] = field(default_factory=dict)
    """Sequences whose first token is not yet reported."""
    num_cached_tokens: dict[str, int] = field(default_factory=dict)
    """The cached prompt tokens of each request."""
    is_launched: bool = False
    shapes_left: int = 0
    """The number of shapes left to precompile; negative once the end was reported."""

    @property
    def num_tracked(self) -> int:
        return len(self.prefills) + len(self.seqs)

    def synchronize(self) -> None:
        """Finish all launched work."""

    def precompile_next(self) -> bool:
        assert not self.num_tracked, "requests wait during the compilation"
        self.shapes_left -= 1
        return self.shapes_left >= 0

    def kv_bytes(self, num_tokens: int) -> int:
        return num_tokens

    def max_piggybacked_tokens(self, prompt: PreparedPrompt, num_seqs: int) -> int:
        assert 0 < num_seqs <= len(self.seqs)
        return max(self.mixed_step_tokens - num_seqs, 0)

    def launch(self, plan: SchedulerOutput) -> FakeStep:
        assert plan.has_runner_work
        assert not self.is_launched, "a step was launched before the last one's result was read"
        self.is_launched = True
        self.plans.append(plan)
        self._store(plan)
        for seq in plan.finished_seqs:
            self.prefills.pop(seq.request_id, None)
            self.seqs.pop(seq, None)
        for new in plan.new:
            assert new.request_id not in self.prefills
            assert new.request_id not in {seq.request_id for seq in self.seqs}
            self._meet(new)
        failures, self.failures = self.failures, {}
        tokens = self._decode(plan, failures)
        assert len({work.start for work in plan.prefills}) <= 1
        assert not plan.is_batched_prefill or len(plan.new) == len(plan.prefills)
        assert not plan.is_batched_prefill or plan.num_prefill_tokens <= self.chunk_tokens
        for work in plan.prefills:
            assert work.is_last or not plan.is_batched_prefill
            self._prefill(work, failures)
        assert len(self.seqs) <= self.max_num_seqs
        is_beside = bool(self.mixed_step_tokens and plan.decode and plan.prefills)
        seconds = None if is_beside else self.prefill_seconds(plan)
        error = next((failure.message for failure in failures.values()), None)
        brought = {seq: [token] for seq, token in tokens.items()}
        return FakeStep(self, StepResult(brought, failures, prefill_seconds=seconds, error=error))

    def _decode(self, plan: SchedulerOutput, failures: dict[str, RequestError]) -> dict[SeqId, int]:
        assert set(plan.decode) == set(self.seqs), "scheduler and runner disagree on the sequences"
        assert len(set(plan.decode)) == len(plan.decode)
        if self.fails_decode and self.seqs:
            self.fails_decode = False
            failures.update({seq.request_id: InternalError("decode failed") for seq in plan.decode})
            self.seqs.clear()
            self.joined.clear()
        return {seq_id: seq.next_token() for seq_id, seq in self.seqs.items()}

    def _prefill(self, work: PrefillWork, failures: dict[str, RequestError]) -> None:
        if work.request_id in self.failing_prefills:
            self.failing_prefills.discard(work.request_id)
            self.prefills.pop(work.request_id, None)
            failures[work.request_id] = InternalError("the chunk failed")
            return
        if errors := self.chunk_errors.get(work.request_id):
            self.prefills.pop(work.request_id, None)
            failures[work.request_id] = errors.pop(0)
            return
        prefill = self.prefills[work.request_id]
        prepared_prompt = prefill.request.prompt
        assert work.start == prefill.num_prefilled, "chunks join without a gap"
        atomic = prepared_prompt.atomic_prefill_tokens
        assert work.start >= atomic or (work.start, work.end >= atomic) == (0, True), "a cut"
        assert 0 < work.end - work.start <= max(self.chunk_tokens, atomic - work.start)
        assert work.is_last == (work.end == prepared_prompt.num_tokens)
        inside = prepared_prompt.points_inside(work.start, work.end)
        assert len(inside) <= _MAX_INNER_POINTS
        assert all(b - a <= MAX_INNER_TOKENS for a, b in pairwise([*inside, work.end]))
        prefill.num_prefilled = work.end
        points = prepared_prompt.snapshot_points
        prefill.snapshots |= {point for point in points if work.start < point <= work.end}
        if work.is_last:
            self.joined[work.request_id] = self.prefills.pop(work.request_id)
            for choice in range(prefill.request.sampling.n):
                seq = _Sequence(prepared_prompt, self.answer(prepared_prompt, choice))
                self.seqs[SeqId(work.request_id, choice)] = seq

    def _meet(self, new: NewRequest) -> None:
        prompt, length = new.prompt, new.prefix.length
        later = [span for span in prompt.spans if span.start >= length]
        assert new.features == tuple(map(features_of, later)), "another's images"
        if length:
            wanted = parts_of(prompt.key)[:length]
            assert length < prompt.num_tokens, "the last token's scores are in no cache"
            assert is_boundary(parts_of(prompt.key), length)
            assert length >= prompt.atomic_prefill_tokens, "it attended to later tokens"
            assert parts_in(new.prefix) == wanted, "another's beginning"
            if self.caches.prefixes.needs_snapshots:
                assert new.prefix.snapshot.parts == wanted, "another's state"
        self.num_cached_tokens[new.request_id] = length
        self.prefills[new.request_id] = _Prefill(new, length)

    def _store(self, plan: SchedulerOutput) -> None:
        finished = {seq.request_id for seq in plan.finished_seqs}
        for request_id in plan.stored_prompts:
            prefill = self.joined.get(request_id)
            assert prefill or request_id in finished, "it is read on"
            if prefill := prefill or self.prefills.get(request_id):
                self._store_prompt(prefill)
        self.joined.clear()
        for seq in plan.stored_answers:
            self._store_answer(seq)

    def _store_prompt(self, prefill: _Prefill) -> None:
        """Up to where it was read."""
        prepared_prompt = prefill.request.prompt
        end = prepared_prompt.key.floor(prefill.num_prefilled)
        key, snapshots = (
            prepared_prompt.key.part(0, end),
            {p for p in prefill.snapshots if p <= end},
        )
        if end < prepared_prompt.num_tokens:
            snapshots |= {end} & {prefill.num_prefilled}
        self.caches.prefixes.insert(
            key, FakeSource(key, frozenset(snapshots)), prepared_prompt.cache_salt
        )

    def _store_answer(self, seq_id: SeqId) -> None:
        seq = self.seqs.get(seq_id)
        if seq is None:
            return
        assert not seq.prompt.is_atomic, "no other prompt can begin with it"
        token_ids = np.concatenate(
            [seq.prompt.token_ids, np.array(seq.reported_ids, dtype=np.int32)]
        )
        key = PromptKey(token_ids, seq.prompt.spans)
        source = FakeSource(key, frozenset([len(key)]))
        self.caches.prefixes.insert(key, source, seq.prompt.cache_salt)


class FakeFeatures(str):
    """Features that name their image."""

    size_bytes = 8
    tokens_per_call: int | None = None


def features_of(span: MediaSpan) -> FakeFeatures:
    """The features that the fake encoder makes of an image."""
    return FakeFeatures(f"features of {span.mm_hash}")


@dataclass
class FakeEncoding:
    """An `EncodeCall` of so many parts, of which `num_launched` were."""

    encoder: FakeEncoder
    works: Sequence[EncodeWork]
    num_parts: int
    num_launched: int = 0

    def advance(self) -> bool:
        assert self.num_launched < self.num_parts
        self.num_launched += 1
        return self.num_launched < self.num_parts

    def result(self) -> list[FakeFeatures]:
        assert self.num_launched == self.num_parts
        return self.encoder.encode(self.works)


@dataclass
class FakeEncoder:
    """An `Encoder` that can be made to wait and to fail."""

    gate: threading.Event = field(default_factory=threading.Event)
    fails: bool = False
    bad: set[str] = field(default_factory=set)
    """Hashes of images that fail any encode call which contains them."""
    calls: list[int] = field(default_factory=list)
    """The number of images of each call."""
    num_parts: int = 1
    encodings: list[FakeEncoding] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()

    def begin(self, works: Sequence[EncodeWork]) -> FakeEncoding:
        self.encodings.append(FakeEncoding(self, works, self.num_parts))
        return self.encodings[-1]

    def encode(self, works: Sequence[EncodeWork]) -> list[FakeFeatures]:
        self.gate.wait(10)
        self.calls.append(len(works))
        if self.fails or self.bad & {work.span.mm_hash for work in works}:
            raise RuntimeError("a bug of the encoder")
        assert all(work.inputs for work in works), "its pixels are not there"
        return [features_of(work.span) for work in works]


@dataclass
class FakePreparer:
    """A `Preparer` that can be made to wait, to refuse (`refuse...`) and to crash (`crash...`)."""

    gate: threading.Event = field(default_factory=threading.Event)
    num_running: int = 0
    most_running: int = 0
    prepared_ids: list[str] = field(default_factory=list)
    cancelled_ids: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()
        self._lock = threading.Lock()

    def prepare(
        self, submit: Submit, cancellation: Cancellation, *, use_disk: bool = True
    ) -> Prepared:
        cancellation.on_cancel(lambda: self.cancelled_ids.append(submit.request_id))
        with self._lock:
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
        self.gate.wait(10)
        with self._lock:
            self.num_running -= 1
            self.prepared_ids.append(submit.request_id)
        return outcome_of(submit)

    @property
    def num_tracked(self) -> int:
        return 0


class Panic(BaseException):
    """A panic of a Rust library: it is no Exception."""


def outcome_of(submit: Submit) -> Prepared:
    """The prepared prompt of a request; raises like `refuse`."""
    parts = submit.messages[0].content
    text = "".join(part.text for part in parts if isinstance(part, TextPart))
    refuse(text)
    return prepared(prompt(text, sum(isinstance(part, ImagePart) for part in parts)))


def header_pixels(submit: Submit) -> int:
    """The number of pixels in a request's images by their headers, as if no cache had one."""
    return sum(image.width * image.height for image in submit.images)


def refuse(text: str) -> None:
    """Raises what a text that begins with `refuse`, `crash` or `panic` asks for."""
    if text.startswith("refuse"):
        raise InvalidRequest("refused", "messages[0]")
    if text.startswith("crash"):
        raise RuntimeError("a bug of the preparer")
    if text.startswith("panic"):
        raise Panic("a bug below Python")


@dataclass
class FakeMemory:
    """A `DeviceMemory` whose sizes a test sets. Sizes in bytes."""

    active_bytes: int = 1
    pool_bytes: int = 2
    limit_bytes: int = 1 << 40
    peak_bytes: int = 3
    num_clears: int = 0
    trims_own_pool: bool = False
    unsettled_bytes: int = 0
    """The part of `active_bytes` that is freed but still held by launched work."""
    used_bytes: int = 5
    """Of the device, as the driver says."""
    num_driver_calls: int = 0
    others_need_some: bool = False
    is_shared: bool = False

    def read(self) -> MemoryReading:
        return MemoryReading(self.active_bytes, self.pool_bytes, self.limit_bytes)

    def set_limit(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes

    def read_peak(self) -> int:
        peak, self.peak_bytes = max(self.peak_bytes, self.active_bytes), 0
        return peak

    def synchronize(self) -> None:
        self.active_bytes -= self.unsettled_bytes
        self.unsettled_bytes = 0

    def clear(self) -> None:
        self.pool_bytes = 0
        self.num_clears += 1

    def is_short(self) -> bool:
        return self.others_need_some

    def device_used_bytes(self) -> int:
        self.num_driver_calls += 1
        return self.used_bytes


@dataclass
class FakeProcess:
    """A `ProcessMemory`."""

    num_trims: int = 0

    def trim(self) -> None:
        self.num_trims += 1

    def footprint_bytes(self) -> int:
        return 4


def answer_texts(events: list[Event]) -> dict[str, str]:
    """The text of first choices in `events`, by request."""
    return {seq.request_id: text for seq, text in sequence_texts(events).items() if not seq.choice}


def sequence_texts(events: list[Event]) -> dict[SeqId, str]:
    """The text in `events`, by choice."""
    found: dict[SeqId, str] = {}
    for delta in deltas(events):
        seq = SeqId(delta.request_id, delta.choice)
        found[seq] = found.get(seq, "") + delta.text
    return found


def deltas(events: list[Event]) -> list[Delta]:
    return [delta for event in events if isinstance(event, Tokens) for delta in event.deltas]
