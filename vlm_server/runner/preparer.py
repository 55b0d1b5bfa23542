"""A request to token ids and pixel arrays. Knows the order of its parts; keeps no mlx array.

Each picture and each video is processed alone, so that what is made of it depends on nothing
else in the request. The whole prompt is tokenized with one token for each of them, then those
are expanded. A family that knows no videos is shown the frames as pictures, each with its time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from PIL import Image as PillowImage

from vlm_server.errors import ContextLengthExceeded, InternalError
from vlm_server.ports import ImageSpan, PreparedPrompt
from vlm_server.protocol import ContentPart, ImagePart, Message, Submit, TextPart, Video, VideoPart
from vlm_server.runner.grammar import Grammars
from vlm_server.runner.images import decode_rgb
from vlm_server.runner.loading import LoadedModel
from vlm_server.runner.processing import GRIDS, Processed, process_picture, process_video
from vlm_server.runner.prompt_tokenizer import Place, PromptTokenizer
from vlm_server.settings import Engine
from vlm_server.settings import Video as VideoLimits
from vlm_server.video import clip

_MAX_FRAMES_AS_PICTURES = 16
"""Of a video: a picture has many more tokens than a frame of a family that knows videos."""


@dataclass(frozen=True, slots=True)
class _Medium:
    """A processed picture or video; `param` names what was sent, `mm_hashes` key its units.

    A video's are never a picture's, even where the bytes are the same (GIF).
    """

    made: Processed
    mm_hashes: tuple[str, ...]
    param: str


class MultimodalPreparer:
    """The `Preparer` of one loaded model. Thread-safe: the processor is locked."""

    def __init__(
        self,
        loaded: LoadedModel,
        video_limits: VideoLimits | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self._loaded = loaded
        self._grammars = grammars or Grammars(loaded, Engine().schema_timeout_seconds)
        self._lock = threading.Lock()
        self._prompts = PromptTokenizer(loaded)
        self._video_limits = video_limits or VideoLimits()
        self._stops: dict[str, clip.Stop] = {}

    def prepare(self, submit: Submit) -> PreparedPrompt:
        """Token ids with the spans of pictures and videos, and their arrays.

        Raises InvalidImage and InvalidVideo for what can't be read, ContextLengthExceeded for
        more than fits, and what `Grammars.compile` and `PromptTokenizer.tokenize` do.
        """
        schema = submit.sampling.json_schema
        self._stops[submit.request_id] = clip.Stop()
        try:
            grammar = None if schema is None else self._grammars.compile(schema)
            messages, media = self._process_all(submit)
        finally:
            del self._stops[submit.request_id]
        places = [Place(m.made.token_id, m.made.prefix, m.made.suffix) for m in media]
        prompt = self._expand(self._prompts.tokenize(messages, places), media)
        return replace(prompt, grammar=grammar)

    def abandon(self, request_id: str) -> None:
        """End the decoding of a video that nobody waits for."""
        if stop := self._stops.get(request_id):
            stop.set()

    def _process_all(self, submit: Submit) -> tuple[list[Message], list[_Medium]]:
        """The messages as the template shall see them, and what stands in them, in order.

        One after the other, so that no two are in memory decoded.
        """
        messages: list[Message] = []
        media: list[_Medium] = []
        num_tokens, limit = 0, self._loaded.context_tokens
        for message in submit.messages:
            parts: list[ContentPart] = []
            for part, medium in self._process_parts(submit, message):
                parts.append(part)
                if medium is None:
                    continue
                media.append(medium)
                num_tokens += len(medium.made.token_ids)
                if num_tokens >= limit:
                    raise ContextLengthExceeded(
                        f"the pictures and videos up to this one have {num_tokens} tokens; "
                        f"this model's context holds {limit}",
                        medium.param,
                    )
            messages.append(Message(message.role, tuple(parts)))
        return messages, media

    def _process_parts(
        self, submit: Submit, message: Message
    ) -> Iterator[tuple[ContentPart, _Medium | None]]:
        for part in message.content:
            match part:
                case TextPart():
                    yield part, None
                case ImagePart(index):
                    image = submit.images[index]
                    shown = f"{image.mm_hash}/{image.max_side_pixels}"
                    yield part, self._picture(decode_rgb(image), shown, image.param)
                case VideoPart(index) if self._prompts.video_placeholder:
                    yield part, self._video(submit, submit.videos[index])
                case VideoPart(index):
                    yield from self._frames(submit, submit.videos[index])

    def _picture(self, picture: PillowImage.Image, mm_hash: str, param: str) -> _Medium:
        with self._lock:
            made = process_picture(self._loaded, self._prompts.placeholder, picture, param)
        return _Medium(made, (mm_hash,), param)

    def _video(self, submit: Submit, video: Video) -> _Medium:
        token_id, placeholder = self._loaded.video_token_id, self._prompts.video_placeholder
        assert token_id is not None
        assert placeholder is not None
        shown = clip.decode(video, self._video_limits, self._stops[submit.request_id])
        with self._lock:
            made = process_video(self._loaded, token_id, placeholder, shown, video.param)
        mm_hashes = tuple(f"{video.mm_hash}/{number}" for number in range(len(made.units)))
        return _Medium(made, mm_hashes, video.param)

    def _frames(self, submit: Submit, video: Video) -> Iterator[tuple[ContentPart, _Medium | None]]:
        """The frames as pictures, each after a text with its time."""
        max_frames = min(self._video_limits.max_frames, _MAX_FRAMES_AS_PICTURES)
        limits = msgspec.structs.replace(self._video_limits, max_frames=max_frames)
        shown = clip.decode(video, limits, self._stops[submit.request_id])
        for number, (seconds, frame) in enumerate(zip(shown.seconds, shown.frames, strict=True)):
            picture = PillowImage.fromarray(frame)
            yield TextPart(f"\nFrame at {seconds:.1f} s:"), None
            yield ImagePart(0), self._picture(picture, f"{video.mm_hash}/{number}", video.param)

    def _expand(self, token_ids: list[int], media: list[_Medium]) -> PreparedPrompt:
        """Replace each medium's token by all of its tokens, and note the spans."""
        ids = np.array(token_ids, dtype=np.int32)
        kinds = [medium.made.token_id for medium in media]
        places = np.flatnonzero(np.isin(ids, kinds))
        if ids[places].tolist() != kinds:
            raise InternalError(f"{len(media)} pictures have {len(places)} places in the prompt")
        pieces, spans, cursor, length = [], list[ImageSpan](), 0, 0
        for place, medium in zip(places, media, strict=True):
            text, made = ids[cursor:place], medium.made
            start = length + len(text)
            cursor, length = int(place) + 1, start + len(made.token_ids)
            pieces += [text, made.token_ids]
            spans += _spans(medium, start)
        whole = np.concatenate([*pieces, ids[cursor:]])
        return PreparedPrompt(whole, tuple(spans), _grids(media))


def _spans(medium: _Medium, start: int) -> Iterator[ImageSpan]:
    """What is encoded of a medium whose first token is the prompt's number `start`."""
    for unit, mm_hash in zip(medium.made.units, medium.mm_hashes, strict=True):
        yield ImageSpan(start + unit.start, start + unit.end, mm_hash, unit.inputs)


def _grids(media: list[_Medium]) -> dict[str, np.ndarray]:
    rows = {name: [m.made.grids[name] for m in media if name in m.made.grids] for name in GRIDS}
    return {name: np.concatenate(found) for name, found in rows.items() if found}
