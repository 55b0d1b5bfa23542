"""The warm-up of a new engine: requests that compile its kernels and check that it answers."""

from __future__ import annotations

import hashlib
import io
import logging
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np
from PIL import Image as PillowImage

from vlm_server.engine.loop import EngineLoop
from vlm_server.errors import EngineBroken, ModelLoadError
from vlm_server.protocol import (
    Abort,
    ContentPart,
    Event,
    Failed,
    Finished,
    Image,
    ImagePart,
    Message,
    Pooling,
    PoolingInput,
    SamplingParams,
    Submit,
    TextPart,
    Video,
    VideoPart,
)
from vlm_server.settings import ModelSettings

logger = logging.getLogger(__name__)

_SAMPLING = SamplingParams(max_tokens=2, temperature=0.0)
_MAX_TOKENS_OVERLAPPING = 512
"""The length of answers that overlap with an image's, which ends first and aborts them."""
_IMAGE_PIXELS = 448
_SMALL_IMAGE_PIXELS = 112
_VIDEO_PIXELS = 160
_VIDEO_FRAMES = 4
_FRAME_MILLISECONDS = 250
_NUM_TEXTS = 8
"""The number of texts for a batched prefill: the batcher first prefills two alone."""
_MAX_TOKENS_DRAFTED = 64
"""The length of an answer to `_SCHEMA` with one token per character."""
_SCHEMA = '{"const": "all of this is drafted, for nothing else may be said"}'
_COMPILERS = ("mlx", "mlx-vlm", "vlm-server")
"""Packages whose versions may differ in the kernels that a warm-up compiles."""


class WarmUpRecord:
    """The record on disk that a model was warmed up: its kernels are compiled, and it can answer.

    It is that of one device, of versions, configuration and type of weights. It lies among MLX's
    compiled kernels, so that who removes those removes it, too.
    """

    def __init__(self, settings: ModelSettings, device_name: str) -> None:
        config = (Path(settings.path) / "config.json").read_bytes()
        versions = tuple(version(name) for name in _COMPILERS)
        key = hashlib.sha256(repr((versions, device_name, str(settings.dtype), config)).encode())
        self._path = Path(tempfile.gettempdir(), "mlx", "warmed-up", key.hexdigest())

    def exists(self) -> bool:
        return self._path.exists()

    def write(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
        except OSError as error:
            logger.warning("the next start will warm up at length again: %s", error)


@dataclass(frozen=True, slots=True)
class WarmUpStage:
    """Requests that run at the same time."""

    name: str
    submits: tuple[Submit, ...]
    """The requests; when the last one ends, the others are aborted."""
    is_needed: bool = True
    """Whether a model that fails the stage is refused."""


def stages(
    *, is_thorough: bool, compiles: bool, with_image: bool, with_video: bool, context_tokens: int
) -> tuple[WarmUpStage, ...]:
    """The stages of a warm-up: a text, a video, an image that joins a text, the image again.

    Only the last one hits the caches. Stages that may fail come first. `compiles` adds stages that
    compile the kernels of batched prefill, drafts and sampling. Unless `is_thorough`, a small
    image with a text, or a text for a model that reads text alone, is the only stage: it checks
    that the model answers. See docs/decisions/0033 and 0062.
    """
    text = _submit("a text prompt")
    if not is_thorough and not with_image:
        return (WarmUpStage("text", (text,)),)
    if not is_thorough:
        small = _image("a prompt with a picture", _SMALL_IMAGE_PIXELS)
        return (WarmUpStage("a picture", (small,)),)
    video = Video(_video(), "warm-up", "GIF", "warm-up")
    image = _image("a prompt with a picture", _IMAGE_PIXELS)
    last = image if with_image else msgspec.structs.replace(text, request_id="a second text")
    max_tokens = min(_MAX_TOKENS_OVERLAPPING, context_tokens // 2)
    longer = msgspec.structs.replace(_SAMPLING, max_tokens=max_tokens)
    running = msgspec.structs.replace(
        text, request_id="a text during a picture", sampling=longer, cache_salt="running"
    )
    clip = _submit("a prompt with a video", VideoPart(0), videos=(video,))
    return (
        WarmUpStage("text", (text,)),
        *([WarmUpStage("a video", (clip,), is_needed=False)] if with_video else []),
        *(_stages_that_compile(text, max_tokens) if compiles else []),
        WarmUpStage("a picture" if with_image else "two texts", (running, last)),
        WarmUpStage("a cached prompt", (last,)),
    )


def pooling_stages(*, with_image: bool, scores: bool) -> tuple[WarmUpStage, ...]:
    """The stages of a model that writes nothing: texts in a batch, and a small image.

    scores: whether it makes scores alone.
    """
    message = Message("user", (TextPart("What is this?"),))
    inputs = tuple(PoolingInput((message,)) for _ in range(_NUM_TEXTS))
    pooling = Pooling("score" if scores else "embed")
    texts = Submit("texts", (), (), _SAMPLING, pooling=pooling, inputs=inputs)
    if not with_image:
        return (WarmUpStage("texts", (texts,)),)
    data = _image_bytes(_SMALL_IMAGE_PIXELS)
    image = Image(data, "warm-up", "PNG", _SMALL_IMAGE_PIXELS, _SMALL_IMAGE_PIXELS, "warm-up")
    shown = PoolingInput((Message("user", (ImagePart(0),)),))
    picture = msgspec.structs.replace(
        texts, request_id="a picture", images=(image,), inputs=(shown,)
    )
    return WarmUpStage("texts", (texts,)), WarmUpStage("a picture", (picture,))


def _stages_that_compile(text: Submit, max_tokens: int) -> list[WarmUpStage]:
    """Texts of two lengths in one batch; drafts of one sequence, then of two.

    The first has a schema, whose drafts are always right; the second is sampled, with wrong drafts.
    """
    one_token = msgspec.structs.replace(_SAMPLING, max_tokens=1)
    longer = Message("user", (TextPart("What is this thing?"),))
    texts = tuple(
        msgspec.structs.replace(
            text,
            request_id=f"text {number}",
            messages=(longer,) if number % 2 else text.messages,
            sampling=one_token,
            cache_salt=f"text {number}",
        )
        for number in range(_NUM_TEXTS)
    )
    follows = SamplingParams(
        max_tokens=min(_MAX_TOKENS_DRAFTED, max_tokens), temperature=0.0, json_schema=_SCHEMA
    )
    constrained = msgspec.structs.replace(text, request_id="a schema", sampling=follows)
    sampled = SamplingParams(
        max_tokens=max_tokens,
        temperature=0.8,
        top_p=0.9,
        top_k=40,
        seed=1,
        presence_penalty=0.5,
        logprobs=2,
        ignore_eos=True,
    )
    running = msgspec.structs.replace(
        text, request_id="a text during a schema", sampling=sampled, prediction="No. " * max_tokens
    )
    return [
        WarmUpStage("several texts", texts, is_needed=False),
        WarmUpStage("drafts", (constrained,), is_needed=False),
        WarmUpStage("drafts of two sequences", (running, constrained), is_needed=False),
    ]


def warm_up(loop: EngineLoop, stage: WarmUpStage) -> bool:
    """Run a stage's requests to their ends, without sending events; returns whether all succeeded.

    Raises ModelLoadError if a needed stage fails.
    """
    events: list[Event] = []
    *overlapping_ids, last_id = (submit.request_id for submit in stage.submits)

    def take(event: Event) -> None:
        events.append(event)
        if isinstance(event, Finished | Failed) and event.request_id == last_id:
            for request_id in overlapping_ids:
                loop.inbox.put(Abort(request_id))

    started_at = time.monotonic()
    for submit in stage.submits:
        loop.inbox.put(submit)
    try:
        replace(loop, send=take).run_until_idle()
    except EngineBroken as error:
        if stage.is_needed:
            raise
        logger.warning("warming up on %s: %s", stage.name, error)
        return False
    logger.debug("warming up on %s: %.1f s", stage.name, time.monotonic() - started_at)
    failure = next((event for event in events if isinstance(event, Failed)), None)
    if failure is None:
        return True
    reason = f"the model can't answer {failure.request_id}: {failure.message}"
    if stage.is_needed:
        raise ModelLoadError(reason)
    logger.warning(reason)
    return False


def _image(request_id: str, side_pixels: int) -> Submit:
    data = _image_bytes(side_pixels)
    image = Image(data, "warm-up", "PNG", side_pixels, side_pixels, "warm-up")
    return _submit(request_id, ImagePart(0), images=(image,))


def _submit(
    request_id: str,
    *media: ContentPart,
    images: tuple[Image, ...] = (),
    videos: tuple[Video, ...] = (),
) -> Submit:
    message = Message("user", (*media, TextPart("What is this?")))
    return Submit(request_id, (message,), images, _SAMPLING, videos)


def _image_bytes(side_pixels: int) -> bytes:
    encoded = io.BytesIO()
    next(_noise(side_pixels)).save(encoded, "PNG")
    return encoded.getvalue()


def _video() -> bytes:
    noise, encoded = _noise(_VIDEO_PIXELS), io.BytesIO()
    first_frame, *other_frames = (next(noise) for _ in range(_VIDEO_FRAMES))
    first_frame.save(
        encoded, "GIF", save_all=True, append_images=other_frames, duration=_FRAME_MILLISECONDS
    )
    return encoded.getvalue()


def _noise(side_pixels: int) -> Iterator[PillowImage.Image]:
    rng = np.random.default_rng(0)
    while True:
        pixels = rng.integers(0, 255, (side_pixels, side_pixels, 3), dtype=np.uint8)
        yield PillowImage.fromarray(pixels)
