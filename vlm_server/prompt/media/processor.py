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
from vlm_server.cache.prompt_key import inputs_hash
from vlm_server.errors import InvalidRequest
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

    key: cache key, by all that its tokens depend on. param: the field of the request. sampled: the
    frames of the video that it is, or that it is part of. page: the page of a document that it
    shows, if any.
    """

    key: str
    layout: TokenLayout
    param: str
    load: Callable[[], Processed]
    sampled: SampledFrames | None
    page: DocumentPage | None = None

    @property
    def mm_hashes(self) -> Sequence[str]:
        """The cache key of the features of each unit."""
        return self.layout.unit_hashes or [f"{self.key}/0"]

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

        item = self._item(self._image_key(image, salt), image.param, load, budget.cancellation)
        return replace(item, page=image.page)

    def video(self, video: Video, salt: str, cancellation: Cancellation) -> MediaItem:
        """A video for a family that takes videos.

        Raises InvalidVideo if it can't be read, and InvalidRequest for an impossible number.
        """
        limits = self._decoders.video_limits
        _check_number(video, limits.max_frames, "(video.max_frames)")
        factor = 1 if self._spec.pixel_rule is None else self._spec.pixel_rule.factor

        def load() -> Processed:
            decoded = self._decoders.video(video, limits, cancellation, factor)
            return self._video(decoded, video.param, salt, cancellation)

        key = self._video_key(video, salt, limits)
        return self._item(key, video.param, load, cancellation)

    def frames(
        self, video: Video, salt: str, cancellation: Cancellation
    ) -> Iterator[tuple[float, MediaItem]]:
        """A video as images, each with its time in seconds. Raises like `video`."""
        max_frames = min(self._decoders.video_limits.max_frames, _MAX_FRAMES_AS_IMAGES)
        _check_number(video, max_frames, "for a model that is shown frames as images")
        self._sizes.check_min_pixels(video.sampling.min_pixels)
        limits = msgspec.structs.replace(self._decoders.video_limits, max_frames=max_frames)
        key = self._video_key(video, salt, limits)
        decoded = cache(lambda: self._decoders.video(video, limits, cancellation))
        sampled: SampledFrames | None = self._caches.token_layouts.get(key)
        if sampled is None:
            hashes = tuple(inputs_hash({"frame": frame}, salt) for frame in decoded().frames)
            sampled = replace(decoded().sampled, hashes=hashes)
            self._caches.token_layouts.put(key, sampled, 250 * len(sampled.seconds)).release()

        for number, time in enumerate(sampled.seconds):
            load = partial(self._frame, decoded, number, video.param, cancellation)
            frame_key = sampled.hashes[number]
            yield time, self._item(frame_key, video.param, load, cancellation, sampled)

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

    def _frame(
        self,
        decoded: Callable[[], Clip],
        number: int,
        param: str,
        cancellation: Cancellation,
    ) -> Processed:
        return self._image(decoded().frames[number], param, cancellation)

    def _image(
        self, pixels: NDArray[np.uint8], param: str, cancellation: Cancellation
    ) -> Processed:
        placeholder = self._template.placeholder
        assert placeholder is not None
        cancellation.check()
        return process_image(self._spec, placeholder, pixels, param)

    def _video(self, decoded: Clip, param: str, salt: str, cancellation: Cancellation) -> Processed:
        token_id, placeholder = self._spec.video_token_id, self._template.video_placeholder
        assert token_id is not None
        assert placeholder is not None
        cancellation.check()
        return process_video(self._spec, token_id, placeholder, decoded, param, salt)

    def _item(
        self,
        key: str,
        param: str,
        load: Callable[[], Processed],
        cancellation: Cancellation,
        sampled: SampledFrames | None = None,
    ) -> MediaItem:
        """`sampled`: of the video that has the item as a frame."""
        once = cache(partial(self._load_processed, key, load, cancellation))
        layout: TokenLayout = self._caches.token_layouts.get(key) or once().layout
        return MediaItem(key, layout, param, once, sampled or layout.sampled)

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
        own = msgspec.structs.replace(video.sampling, param="")
        sampling = (limits.fps, limits.max_frames, limits.max_side_pixels)
        return self._key("video", salt, video.content_hash, *sampling, str(own))

    def _key(self, *parts: str | float | None) -> str:
        text = "\0".join(map(str, parts))
        return hashlib.sha256(text.encode()).hexdigest()


def _check_number(video: Video, max_frames: int, reason: str) -> None:
    """Raises InvalidRequest for more frames than `max_frames`; `reason` ends the sentence."""
    number = video.sampling.num_frames
    if number is not None and number > max_frames:
        raise InvalidRequest(
            f"`num_frames` is {number}: at most {max_frames} are possible {reason}.",
            video.sampling.param or video.param,
        )


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


def images_used(media: Sequence[MediaItem]) -> tuple[ImageUse, ...]:
    """Size and tokens of each image among `media`, in order; not of pages."""
    return tuple(
        ImageUse(*item.layout.size, len(item.layout.token_ids))
        for item in media
        if item.sampled is None and item.page is None and item.layout.size is not None
    )


def videos_used(media: Sequence[MediaItem]) -> tuple[VideoUse, ...]:
    """Frames and tokens of each video among `media`, in order; a video may be several items."""
    uses = []
    for (_, sampled), items in groupby(media, lambda item: (item.param, item.sampled)):
        if sampled is not None:
            layouts = [item.layout for item in items]
            width, height = layouts[0].size or (0, 0)
            times = tuple(round(seconds, 3) for seconds in sampled.seconds)
            num_tokens = sum(len(layout.token_ids) for layout in layouts)
            uses.append(
                VideoUse(len(times), times[-1], num_tokens, sampled.is_cut, width, height, times)
            )
    return tuple(uses)
