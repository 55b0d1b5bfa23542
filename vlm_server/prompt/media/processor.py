"""Images and videos, decoded and processed one by one unless a cache has the result.

Thread-safe: only one thread works on the same item. Between two steps of a cancelled request,
`Cancelled` is raised.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby

import msgspec
import numpy as np
from numpy.typing import NDArray

from vlm_server.cache.caches import Caches
from vlm_server.cache.prompt_key import MediaSpan
from vlm_server.errors import InternalError
from vlm_server.interfaces import MediaInputs
from vlm_server.interfaces.model_spec import ModelSpec
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.prompt.media.decoders import Clip, DecodeBudget, Decoders, SampledFrames
from vlm_server.prompt.media.image_sizes import ImageSizes
from vlm_server.prompt.media.processing import Processed, TokenLayout, process_image, process_video
from vlm_server.prompt.template.templates import ChatTemplate
from vlm_server.protocol import DocumentPage, Image, ImageUse, Submit, Video, VideoUse
from vlm_server.settings import VideoSettings

_MAX_FRAMES_AS_IMAGES = 16
"""The most frames of a video shown as images, which take many more tokens than frames do."""


@dataclass(frozen=True, eq=False)
class MediaItem:
    """An image or a video of one request, or a frame of a video.

    key: cache key, by all that its features depend on. param: the field of the request. page: the
    page of a document that it shows, if any.
    """

    key: str
    layout: TokenLayout
    param: str
    load: Callable[[], Processed]
    is_image: bool
    page: DocumentPage | None = None

    @property
    def mm_hashes(self) -> list[str]:
        """The cache key of each unit."""
        return [f"{self.key}/{number}" for number in range(len(self.layout.units))]

    def inputs(self, unit: int) -> MediaInputs:
        """The vision tower's inputs of a unit, processed here if not cached.

        Raises InvalidImage or InvalidVideo.
        """
        return self.load().inputs[unit]


class MediaProcessor:
    """Processes the media of one model. `salt` separates requests that share no cache entries."""

    def __init__(
        self, spec: ModelSpec, template: ChatTemplate, decoders: Decoders, caches: Caches
    ) -> None:
        self._spec = spec
        self._template = template
        self._decoders = decoders
        self._caches = caches
        self._locks = _KeyLocks()
        self._sizes = ImageSizes(spec.pixel_rule, decoders.image_limits)

    def begin(self, cancellation: Cancellation) -> DecodeBudget:
        """The decode budget of one request."""
        return DecodeBudget(self._decoders.image_limits, cancellation)

    def image(self, image: Image, salt: str, budget: DecodeBudget) -> MediaItem:
        """Raises InvalidImage, DecodeBudgetExceeded, and InvalidRequest for an impossible size."""
        self._sizes.check(image)

        def load() -> Processed:
            decoded = self._decoders.image(image, budget)
            decoded = self._sizes.scale(decoded, self._sizes.bounds(image))
            return self._image(decoded, image.param, budget.cancellation)

        key = self._image_key(image, salt)
        item = self._item(key, image.param, load, budget.cancellation, is_image=True)
        return replace(item, page=image.page)

    def video(self, video: Video, salt: str, cancellation: Cancellation) -> MediaItem:
        """A video for a family that takes videos. Raises InvalidVideo if it can't be read."""
        limits = self._decoders.video_limits

        def load() -> Processed:
            decoded = self._decoders.video(video, limits, cancellation)
            return self._video(decoded, video.param, cancellation)

        key = self._video_key(video, salt, limits)
        return self._item(key, video.param, load, cancellation)

    def frames(
        self, video: Video, salt: str, cancellation: Cancellation
    ) -> Iterator[tuple[float, MediaItem]]:
        """A video as images, each with its time in seconds. Raises InvalidVideo like `video`."""
        max_frames = min(self._decoders.video_limits.max_frames, _MAX_FRAMES_AS_IMAGES)
        limits = msgspec.structs.replace(self._decoders.video_limits, max_frames=max_frames)
        key = self._video_key(video, salt, limits)
        decoded = cache(lambda: self._decoders.video(video, limits, cancellation))
        sampled: SampledFrames | None = self._caches.token_layouts.get(key)
        if sampled is None:
            sampled = decoded().sampled
            self._caches.token_layouts.put(key, sampled, 100 * len(sampled.seconds)).release()

        def frame(number: int) -> Processed:
            processed = self._image(decoded().frames[number], video.param, cancellation)
            return replace(processed, layout=replace(processed.layout, sampled=sampled))

        for number, time in enumerate(sampled.seconds):
            load = partial(frame, number)
            yield time, self._item(f"{key}/{number}", video.param, load, cancellation)

    def pixels_to_decode(self, submit: Submit) -> int:
        """The approximate number of pixels of a request's images that are not cached."""
        num_pixels, caches = 0, self._caches
        for image in submit.images:
            key = self._image_key(image, submit.cache_salt)
            has_inputs = f"{key}/0" in caches.features or key in caches.pixels
            if not has_inputs or key not in caches.token_layouts:
                num_pixels += image.width * image.height
        return num_pixels

    @property
    def num_in_flight(self) -> int:
        """Media items being processed, or waiting for a thread."""
        return len(self._locks) + self._decoders.num_tracked

    def _image(
        self, pixels: NDArray[np.uint8], param: str, cancellation: Cancellation
    ) -> Processed:
        placeholder = self._template.placeholder
        assert placeholder is not None
        cancellation.check()
        return process_image(self._spec, placeholder, pixels, param)

    def _video(self, decoded: Clip, param: str, cancellation: Cancellation) -> Processed:
        token_id, placeholder = self._spec.video_token_id, self._template.video_placeholder
        assert token_id is not None
        assert placeholder is not None
        cancellation.check()
        return process_video(self._spec, token_id, placeholder, decoded, param)

    def _item(
        self,
        key: str,
        param: str,
        load: Callable[[], Processed],
        cancellation: Cancellation,
        *,
        is_image: bool = False,
    ) -> MediaItem:
        once = cache(partial(self._load_processed, key, load, cancellation))
        layout: TokenLayout | None = self._caches.token_layouts.get(key)
        return MediaItem(key, layout or once().layout, param, once, is_image)

    def _load_processed(
        self, key: str, load: Callable[[], Processed], cancellation: Cancellation
    ) -> Processed:
        with self._locks.hold(key, cancellation):
            processed: Processed | None = self._caches.pixels.get(key)
            if processed is None:
                processed = load()
                self._caches.pixels.put(key, processed, processed.size_bytes).release()
                self._caches.token_layouts.put(
                    key, processed.layout, processed.layout.size_bytes
                ).release()
        return processed

    def _image_key(self, image: Image, salt: str) -> str:
        bound = image.max_side_pixels
        is_larger = bound is not None and max(image.width, image.height) > bound
        side = bound if is_larger else None
        return self._key("image", salt, image.content_hash, side, str(self._sizes.bounds(image)))

    def _video_key(self, video: Video, salt: str, limits: VideoSettings) -> str:
        """The cache key of the sampled frames. A GIF as an image has another key."""
        sampling = (limits.fps, limits.max_frames, limits.max_side_pixels)
        return self._key("video", salt, video.content_hash, *sampling)

    def _key(self, *parts: str | float | None) -> str:
        text = "\0".join(map(str, parts))
        return hashlib.sha256(text.encode()).hexdigest()


class _KeyLocks:
    """A lock per key."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._busy: set[str] = set()
        self._num_threads = 0

    def __len__(self) -> int:
        """Threads that hold a lock, or wait for one."""
        with self._changed:
            return self._num_threads

    @contextmanager
    def hold(self, key: str, cancellation: Cancellation) -> Iterator[None]:
        """Hold the lock of `key` for the `with` block. Raises Cancelled."""
        cancellation.on_cancel(self._wake)
        with self._changed:
            self._num_threads += 1
            try:
                with cancellation.bounded():  # the holder's work is bounded
                    self._changed.wait_for(
                        lambda: cancellation.is_cancelled or key not in self._busy
                    )
                cancellation.check()
            except BaseException:
                self._num_threads -= 1
                raise
            self._busy.add(key)
        try:
            yield
        finally:
            with self._changed:
                self._num_threads -= 1
                self._busy.remove(key)
                self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


def image_uses(media: Sequence[MediaItem]) -> tuple[ImageUse, ...]:
    """Size and tokens of each image among `media`, as the model sees it; not of pages."""
    return tuple(
        ImageUse(*item.layout.size, len(item.layout.token_ids))
        for item in media
        if item.is_image and item.page is None and item.layout.size is not None
    )


def video_uses(media: Sequence[MediaItem]) -> tuple[VideoUse, ...]:
    """Frames and tokens of each video among `media`; a video may be several items."""
    uses = []
    for (_, sampled), items in groupby(media, lambda item: (item.param, item.layout.sampled)):
        if sampled is not None:
            num_tokens = sum(len(item.layout.token_ids) for item in items)
            num_frames, last_seconds = len(sampled.seconds), round(sampled.seconds[-1], 3)
            uses.append(VideoUse(num_frames, last_seconds, num_tokens, sampled.is_cut))
    return tuple(uses)


def expand(
    token_ids: list[int], media: list[MediaItem]
) -> tuple[NDArray[np.int32], tuple[MediaSpan, ...], list[tuple[int, NDArray[np.int32]]]]:
    """The token ids of a prompt with all tokens of its media, (tokens,), and its spans in order.

    Also the first token and the M-RoPE positions, (3, tokens), of each media item that has any.
    """
    ids = np.array(token_ids, dtype=np.int32)
    kinds = [item.layout.token_id for item in media]
    indices = np.flatnonzero(np.isin(ids, kinds))
    if ids[indices].tolist() != kinds:
        raise InternalError(f"{len(media)} images have {len(indices)} tokens in the prompt.")
    parts, spans, placed, cursor, length = [], list[MediaSpan](), [], 0, 0
    for index, item in zip(indices, media, strict=True):
        text, layout = ids[cursor:index], item.layout
        start = length + len(text)
        cursor, length = int(index) + 1, start + len(layout.token_ids)
        parts += [text, layout.token_ids]
        placed += [(start, layout.positions)] if layout.positions is not None else []
        for (first, end), mm_hash in zip(layout.units, item.mm_hashes, strict=True):
            spans.append(MediaSpan(start + first, start + end, mm_hash))
    return np.concatenate([*parts, ids[cursor:]]), tuple(spans), placed
