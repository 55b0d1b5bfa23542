"""A real engine on a tiny model, driven beat by beat: the test says what runs beside what."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mlx_vlm.utils import should_add_special_tokens
from PIL import Image as PillowImage

from vlm_server import settings
from vlm_server.cache.caches import Caches, EncodedImage
from vlm_server.engine.scheduling.limits import SchedulerConfig
from vlm_server.engine.scheduling.scheduler import Scheduler
from vlm_server.errors import InternalError, RequestError
from vlm_server.ports import EncodeWork, PreparedPrompt, SeqId
from vlm_server.prompt.grammar import Grammars
from vlm_server.prompt.preparer import MultimodalPreparer
from vlm_server.protocol import (
    ContentPart,
    Event,
    Failed,
    Finished,
    FinishReason,
    Image,
    ImagePart,
    Message,
    SamplingParams,
    Submit,
    TextPart,
    TokenLogprob,
    Tokens,
    Video,
    VideoPart,
)
from vlm_server.runner.device.device import current_device
from vlm_server.runner.model.load import LoadedModel, load
from vlm_server.runner.model_runner import ModelRunner
from vlm_server.runner.vision.encoder import ImageEncoder

Part = str | PillowImage.Image | Image | Video
GREEDY = SamplingParams(max_tokens=10, temperature=0.0)


def encoded(picture: PillowImage.Image, name: str = "PNG", **options: object) -> Image:
    """A picture as the front would hand it over."""
    buffer = io.BytesIO()
    picture.save(buffer, name, **options)
    return image_of(buffer.getvalue(), name, *picture.size)


def image_of(data: bytes, name: str, width: int, height: int) -> Image:
    return Image(data, hashlib.sha256(data).hexdigest(), name, width, height, "messages[0]")


def video_of(data: bytes, name: str = "MP4") -> Video:
    """A video as the front would hand it over."""
    return Video(data, hashlib.sha256(data).hexdigest(), name, "messages[0]")


def ask(request_id: str, *parts: Part, sampling: SamplingParams = GREEDY) -> Submit:
    """One user message of texts and pictures, in this order."""
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
        images.append(part if isinstance(part, Image) else encoded(part))
        return ImagePart(len(images) - 1)

    messages = tuple(
        Message(role, tuple(map(part_of, parts)))  # type: ignore[arg-type]
        for role, parts in turns
    )
    return Submit(request_id, messages, tuple(images), sampling, tuple(videos))


def for_mlx_vlm(loaded: LoadedModel, rendered: str, *, has_pictures: bool) -> str:
    """A rendered prompt without the BOS that mlx-vlm adds once more."""
    adds_bos = has_pictures or should_add_special_tokens(loaded.family.name, loaded.processor)
    return rendered.removeprefix(loaded.host.tokenizer.bos_token or "") if adds_bos else rendered


def load_model(folder: Path | str, **options: Any) -> LoadedModel:
    """The checkpoint in `folder` on MLX's default device; `options` are further settings."""
    return load(settings.Model(path=str(folder), **options), current_device())


def new_preparer(
    loaded: LoadedModel,
    limits: settings.Video | None = None,
    grammars: Grammars | None = None,
    caches: Caches | None = None,
) -> MultimodalPreparer:
    """A preparer with the default settings, whose caches keep nothing unless they are given."""
    grammars = grammars or Grammars(loaded.host, settings.Engine().schema_timeout_seconds)
    return MultimodalPreparer(
        loaded.host, limits or settings.Video(), grammars, caches or Caches.of()
    )


@dataclass
class Engine:
    """Scheduler, runner and preparer of one model; requests are prepared when they come."""

    loaded: LoadedModel
    preparer: MultimodalPreparer
    chunk_tokens: int = 512
    max_num_seqs: int = 8
    caches: Caches = field(default_factory=Caches.of)
    """Those that keep anything are in use by scheduler, runner and a preparer of their own."""
    rows: dict[SeqId, list[int]] = field(default_factory=dict)
    """All tokens of each choice."""
    seq_texts: dict[SeqId, str] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    finish_reasons: dict[SeqId, FinishReason] = field(default_factory=dict)
    ends: dict[str, Finished | Failed] = field(default_factory=dict)
    prompts: dict[str, PreparedPrompt] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(reading.limit_bytes for reading in self.caches.ledger.read()):
            self.preparer = new_preparer(self.loaded, caches=self.caches)
        self.runner = ModelRunner(self.loaded, self.caches)
        self.encoder = ImageEncoder(self.loaded)
        self._outcome: tuple[str, EncodedImage | RequestError] | None = None
        config = SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            prefill_chunk_tokens=self.chunk_tokens,
            max_step_seconds=60.0,
            max_preparing=8,
            context_tokens=self.loaded.host.context_tokens,
            vocabulary_size=self.loaded.host.vocabulary_size,
            eos_token_ids=self.loaded.host.eos_token_ids,
            default_temperature=self.loaded.default_temperature,
            default_top_p=self.loaded.default_top_p,
        )
        self.scheduler = Scheduler(config, self.loaded.host.backend, self.caches)

    @property
    def tokens(self) -> dict[str, list[int]]:
        """All tokens of each request's first choice."""
        return {row.request_id: tokens for row, tokens in self.rows.items() if not row.choice}

    @property
    def texts(self) -> dict[str, str]:
        """All the text of each request's first choice."""
        return {row.request_id: text for row, text in self.seq_texts.items() if not row.choice}

    def add(self, submit: Submit) -> None:
        self._take(self.scheduler.add(submit))
        for started in self.scheduler.start_preparing():
            outcome: PreparedPrompt | RequestError
            try:
                outcome = self.prompts[started.request_id] = self.preparer.prepare(started)
            except RequestError as error:
                outcome = error
            self._take(self.scheduler.prepared(started.request_id, outcome))

    def abort(self, request_id: str) -> None:
        self._take(self.scheduler.abort(request_id))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self._encode(self.scheduler.start_encoding())
            self._take_encoded()
            plan = self.scheduler.schedule()
            following = self.scheduler.start_encoding_behind(plan)
            if plan.is_empty:
                continue
            result = self.runner.execute(plan, partial(self._encode, following))
            for row, token in result.tokens.items():
                self.rows.setdefault(row, []).append(token)
            self._take(self.scheduler.update(plan, result))
            self._take_encoded()

    def _encode(self, work: EncodeWork | None) -> None:
        """The real encoder has a thread of its own."""
        if work is None:
            return
        outcome: EncodedImage | RequestError
        try:
            outcome = self.encoder.encode(work.prompt, work.image_index)
        except RequestError as error:
            outcome = error
        except Exception:  # noqa: BLE001 - as the loop does
            outcome = InternalError("encoding failed")
        self._outcome = work.request_id, outcome

    def _take_encoded(self) -> None:
        if self._outcome:
            outcome, self._outcome = self._outcome, None
            self._take(self.scheduler.encoded(*outcome))

    def step_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(1000):
            if condition():
                return
            self.step()
        raise AssertionError("it never came to that")

    def run(self) -> None:
        """To the end of every request, the last of which leaves nothing."""
        self.step_until(lambda: not self.scheduler.num_tracked)
        assert self.scheduler.num_tracked == self.runner.num_tracked == 0

    def answer(self, submit: Submit) -> list[int]:
        """All tokens of a request that runs with whatever else is there."""
        self.add(submit)
        self.run()
        end = self.ends[submit.request_id]
        assert isinstance(end, Finished), end
        return self.tokens[submit.request_id]

    def _take(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Tokens(deltas):
                    for delta in deltas:
                        row = SeqId(delta.request_id, delta.choice)
                        self.seq_texts[row] = self.seq_texts.get(row, "") + delta.text
                        if delta.finish_reason:
                            self.finish_reasons[row] = delta.finish_reason
                        self.logprobs.setdefault(delta.request_id, []).extend(delta.logprobs)
                case Finished() | Failed():
                    assert event.request_id not in self.ends
                    self.ends[event.request_id] = event
                case _:
                    pass


NewEngine = Callable[..., Engine]
