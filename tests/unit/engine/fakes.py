"""A runner, a preparer and a decoder that obey the ports, without a model.

What the fake model answers depends on the prompt and the choice alone, so that a test can tell
what a request must get whatever runs beside it. The runner checks every plan and is one step
behind, like the real one: a row's token is reported by the step after the one that drew it.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tests.unit.cache.fakes import FakeSource, parts_in
from tests.unit.cache.prompts import is_boundary, parts_of
from vlm_server.cache.caches import Caches
from vlm_server.cache.prompt_key import PromptKey
from vlm_server.engine.scheduling.limits import SchedulerConfig
from vlm_server.engine.scheduling.scheduler import Scheduler
from vlm_server.errors import InternalError, InvalidRequest, RequestError
from vlm_server.ports import (
    ImageSpan,
    MemoryReading,
    NewRequest,
    PreparedPrompt,
    SchedulerOutput,
    SeqId,
    StepResult,
)
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


def config(**changes: object) -> SchedulerConfig:
    """Small limits; `changes` replace single ones."""
    values: dict[str, object] = {
        "max_num_seqs": 3,
        "prefill_chunk_tokens": 5,
        "max_step_seconds": 1.0,
        "max_preparing": 2,
        "context_tokens": 200,
        "vocabulary_size": 259,
        "eos_token_ids": frozenset({EOS}),
        "default_temperature": 0.0,
        "default_top_p": 1.0,
    }
    return SchedulerConfig(**(values | changes))  # type: ignore[arg-type]


def scheduler(caches: Caches | None = None, **changes: object) -> Scheduler:
    return Scheduler(config(**changes), ByteDecoder(), caches)


def submit(request_id: str, text: str = "hello", images: int = 0, **sampling: object) -> Submit:
    """A user's message: `images` pictures, then `text`."""
    pictures = tuple(
        Image(b"", f"{request_id}-{n}", "PNG", 8, 8, f"messages[0].content[{n}]")
        for n in range(images)
    )
    parts = (*map(ImagePart, range(images)), TextPart(text))
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return Submit(request_id, (Message("user", parts),), pictures, params)


def prompt(text: str = "hello", images: int = 0) -> PreparedPrompt:
    """What `FakePreparer` makes of `submit(..., text, images)`."""
    size = TOKENS_PER_IMAGE
    ids = [IMAGE_TOKEN] * (size * images) + list(text.encode())
    pixels = {"pixel_values": np.zeros((1, 2), np.float32)}
    spans = [ImageSpan(size * n, size * (n + 1), f"{n}", pixels) for n in range(images)]
    return PreparedPrompt(np.array(ids, dtype=np.int32), tuple(spans))


def answer_tokens(prepared: PreparedPrompt, choice: int = 0) -> list[int]:
    """What the fake model says to a prompt: up to 12 characters of 1 to 4 bytes, then EOS."""
    shown = "".join(span.key for span in prepared.spans).encode()
    digest = hashlib.sha256(prepared.token_ids.tobytes() + shown + bytes(choice)).digest()
    characters = ["abcdefghijklmnop é€😀"[byte % 19] for byte in digest[1 : 2 + digest[0] % 12]]
    return [*"".join(characters).encode(), EOS]


def answer_text(prepared: PreparedPrompt, max_tokens: int = 1000, choice: int = 0) -> str:
    """The text of the first `max_tokens` tokens of the answer."""
    return ByteDecoder().decode(answer_tokens(prepared, choice)[:max_tokens])


@dataclass
class _Prefill:
    request: NewRequest
    num_prefilled: int
    snapshots: set[int] = field(default_factory=set)
    """The snapshot points that it came by."""


@dataclass
class _Row:
    prompt: PreparedPrompt
    answer: list[int]
    told: list[int] = field(default_factory=list)
    """The first token is drawn when the row joins, and told with the next step."""

    def next_token(self) -> int:
        """The token drawn last, once the next one is launched."""
        past = len(self.told)
        self.told.append(self.answer[past] if past < len(self.answer) else ord("!"))
        return self.told[-1]


@dataclass
class FakeRunner:
    """A `Runner` that refuses every plan that the real one could not carry out."""

    max_num_seqs: int
    chunk_tokens: int
    failing_prefills: set[str] = field(default_factory=set)
    """Requests whose next chunk fails."""
    seconds_per_token: float = 0.0
    """What prefilling is said to take."""
    fails_decode: bool = False
    """Whether the next decode step fails."""
    plans: list[SchedulerOutput] = field(default_factory=list)
    prefills: dict[str, _Prefill] = field(default_factory=dict)
    rows: dict[SeqId, _Row] = field(default_factory=dict)
    caches: Caches = field(default_factory=Caches.of)
    joined: dict[str, _Prefill] = field(default_factory=dict)
    """Whose first token is not told yet."""
    num_cached_tokens: dict[str, int] = field(default_factory=dict)
    """What each request that it met did not have to prefill."""

    @property
    def num_tracked(self) -> int:
        return len(self.prefills) + len(self.rows)

    def kv_bytes(self, num_tokens: int) -> int:
        return num_tokens

    def execute(
        self, plan: SchedulerOutput, launched: Callable[[], None] = lambda: None
    ) -> StepResult:
        assert not plan.is_empty
        self.plans.append(plan)
        for row in plan.released:
            self.prefills.pop(row.request_id, None)
            self._store_answer(row)
            self.rows.pop(row, None)
        for row in plan.released:
            self.joined.pop(row.request_id, None)
        for new in plan.new:
            assert new.request_id not in self.prefills
            assert new.request_id not in {row.request_id for row in self.rows}
            self._meet(new)
        failures: dict[str, RequestError] = {}
        tokens = self._decode(plan, failures)
        self._prefill(plan, failures)
        launched()
        assert len(self.rows) <= self.max_num_seqs
        work = plan.prefill
        seconds = (work.end - work.start) * self.seconds_per_token if work else 0.0
        error = next((failure.message for failure in failures.values()), None)
        return StepResult(tokens, failures, prefill_seconds=seconds, error=error)

    def _decode(self, plan: SchedulerOutput, failures: dict[str, RequestError]) -> dict[SeqId, int]:
        assert set(plan.decode) == set(self.rows), "scheduler and runner disagree on the rows"
        assert len(set(plan.decode)) == len(plan.decode)
        if self.fails_decode and self.rows:
            self.fails_decode = False
            failures.update({row.request_id: InternalError("decode failed") for row in plan.decode})
            self.rows.clear()
            self.joined.clear()
        tokens = {row_id: row.next_token() for row_id, row in self.rows.items()}
        for prefill in self.joined.values():
            made = prefill.request.prompt
            if made.is_atomic:
                continue
            source = FakeSource(made.elements, frozenset(prefill.snapshots))
            self.caches.prefixes.insert(made.elements, source, made.cache_salt)
        self.joined.clear()
        return tokens

    def _prefill(self, plan: SchedulerOutput, failures: dict[str, RequestError]) -> None:
        work = plan.prefill
        if work is None:
            return
        if work.request_id in self.failing_prefills:
            self.failing_prefills.discard(work.request_id)
            failures[work.request_id] = InternalError("the chunk failed")
            return
        prefill = self.prefills[work.request_id]
        prepared = prefill.request.prompt
        assert work.start == prefill.num_prefilled, "chunks join without a gap"
        uncut = prepared.atomic_prefill_tokens
        assert work.start >= uncut or (work.start, work.end >= uncut) == (0, True), "a cut"
        assert 0 < work.end - work.start <= max(self.chunk_tokens, uncut - work.start)
        assert work.is_last == (work.end == prepared.num_tokens)
        assert not any(work.start < border < work.end for border in prepared.snapshot_points)
        prefill.num_prefilled = work.end
        prefill.snapshots |= {work.end} & set(prepared.snapshot_points)
        if work.is_last:
            self.joined[work.request_id] = self.prefills.pop(work.request_id)
            for choice in range(prefill.request.sampling.n):
                row = _Row(prepared, answer_tokens(prepared, choice))
                self.rows[SeqId(work.request_id, choice)] = row

    def _meet(self, new: NewRequest) -> None:
        prompt, length = new.prompt, new.prompt.num_cached_tokens
        assert new.images == tuple(map(features_of, prompt.images)), "another's pictures"
        later = [span.key for span in prompt.spans if span.start >= length]
        assert not prompt.spans or [span.mm_hash for span in prompt.images] == later
        if prompt.prefix and length:
            wanted = parts_of(prompt.elements)[:length]
            assert length < prompt.num_tokens, "the last token's scores are in no cache"
            assert is_boundary(parts_of(prompt.elements), length)
            assert length >= prompt.atomic_prefill_tokens, "it saw other tokens behind it"
            assert parts_in(prompt.prefix) == wanted, "another's beginning"
            if self.caches.prefixes.needs_snapshots:
                assert prompt.prefix.snapshot.parts == wanted, "another's state"
        self.num_cached_tokens[new.request_id] = length
        self.prefills[new.request_id] = _Prefill(new, length)

    def _store_answer(self, row_id: SeqId) -> None:
        row = self.rows.get(row_id)
        if row is None or row_id.request_id in self.joined or row.prompt.is_atomic:
            return
        token_ids = np.concatenate([row.prompt.token_ids, np.array(row.told, dtype=np.int32)])
        elements = PromptKey(token_ids, row.prompt.spans)
        source = FakeSource(elements, frozenset([len(elements)]))
        self.caches.prefixes.insert(elements, source, row.prompt.cache_salt)


class FakeFeatures(str):
    """What names the picture that it was made of."""

    size_bytes = 8


def features_of(span: ImageSpan) -> FakeFeatures:
    """What the fake encoder makes of a picture."""
    return FakeFeatures(f"features of {span.mm_hash}")


@dataclass
class FakeEncoder:
    """An `Encoder` that can be made to wait and to fail."""

    gate: threading.Event = field(default_factory=threading.Event)
    fails: bool = False

    def __post_init__(self) -> None:
        self.gate.set()

    def encode(self, prompt: PreparedPrompt, image_index: int) -> FakeFeatures:
        self.gate.wait(10)
        if self.fails:
            raise RuntimeError("a bug of the encoder")
        return features_of(prompt.images[image_index])


@dataclass
class FakePreparer:
    """A `Preparer` that can be made to wait, to refuse (`refuse...`) and to crash (`crash...`)."""

    gate: threading.Event = field(default_factory=threading.Event)
    num_running: int = 0
    most_running: int = 0
    prepared_ids: list[str] = field(default_factory=list)
    abandoned_ids: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()
        self._lock = threading.Lock()

    def prepare(self, submit: Submit) -> PreparedPrompt:
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
        return self.num_running

    def abandon(self, request_id: str) -> None:
        self.abandoned_ids.append(request_id)


class Panic(BaseException):
    """As libraries in Rust raise it: no Exception."""


def outcome_of(submit: Submit) -> PreparedPrompt:
    """What `prompt` makes of it; raises like `refuse`."""
    parts = submit.messages[0].content
    text = "".join(part.text for part in parts if isinstance(part, TextPart))
    refuse(text)
    return prompt(text, sum(isinstance(part, ImagePart) for part in parts))


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
    """A `DeviceMemory` that holds what a test says. Sizes in bytes."""

    active_bytes: int = 1
    pool_bytes: int = 2
    limit_bytes: int = 1 << 40
    pool_limit_bytes: int = 100
    peak_bytes: int = 3
    num_clears: int = 0
    num_trims: int = 0
    trims_own_pool: bool = False
    unsettled_bytes: int = 0
    """Of `active_bytes`: what was let go, and is held by what is under way."""

    def read(self) -> MemoryReading:
        return MemoryReading(self.active_bytes, self.pool_bytes, self.limit_bytes)

    def take_peak(self) -> int:
        peak, self.peak_bytes = max(self.peak_bytes, self.active_bytes), 0
        return peak

    def settle(self) -> None:
        self.active_bytes -= self.unsettled_bytes
        self.unsettled_bytes = 0

    def clear(self) -> None:
        self.pool_bytes = 0
        self.num_clears += 1

    def trim(self) -> None:
        self.num_trims += 1

    def footprint_bytes(self) -> int:
        return 4

    def device_used_bytes(self) -> int:
        return 5


def texts(events: list[Event]) -> dict[str, str]:
    """All the text of first choices that `events` bring, by request."""
    return {row.request_id: text for row, text in seq_texts(events).items() if not row.choice}


def seq_texts(events: list[Event]) -> dict[SeqId, str]:
    """All the text that `events` bring, by choice."""
    found: dict[SeqId, str] = {}
    for delta in deltas(events):
        row = SeqId(delta.request_id, delta.choice)
        found[row] = found.get(row, "") + delta.text
    return found


def deltas(events: list[Event]) -> list[Delta]:
    return [delta for event in events if isinstance(event, Tokens) for delta in event.deltas]
