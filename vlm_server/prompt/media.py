"""Decodes and processes images and videos, unless a cache has the result.

Each is processed alone, so that the result depends on nothing else in a request. Thread-safe: the
processor is locked, and of several threads that want the same item one works and the others wait.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial

import msgspec
from PIL import Image as PillowImage

from vlm_server.cache.caches import Caches
from vlm_server.host_model import HostModel
from vlm_server.child.cancellation import Cancellation
from vlm_server.prompt.images import decode_rgb
from vlm_server.prompt.processing import (
    Inputs,
    Processed,
    TokenLayout,
    process_image,
    process_video,
)
from vlm_server.prompt.tokenizer import PromptTokenizer
from vlm_server.protocol import Image, Video
from vlm_server.settings import Video as VideoLimits
from vlm_server.video import clip

_MAX_FRAMES_AS_IMAGES = 16
"""Of a video: an image has many more tokens than a frame for a family that takes videos."""


class MediaItem:
    """An image or a video of one request.

    `mm_hashes` name its units, with all that their features follow from; `param` names what was
    sent.
    """

    def __init__(
        self, key: str, layout: TokenLayout, param: str, load: Callable[[], Processed]
    ) -> None:
        self.layout = layout
        self.mm_hashes = tuple(f"{key}/{number}" for number in range(len(layout.units)))
        self.param = param
        self._load = load

    def inputs(self, unit: int) -> Inputs:
        """What the tower takes of a unit. Decodes and processes the item if no cache has it.

        Raises InvalidImage or InvalidVideo if that fails.
        """
        return self._load().inputs[unit]


class MediaProcessor:
    """Makes the media items of one model's requests.

    `salt` separates requests that must not share cache entries.
    """

    def __init__(
        self,
        host: HostModel,
        prompts: PromptTokenizer,
        video_limits: VideoLimits,
        caches: Caches,
    ) -> None:
        self._host = host
        self._prompts = prompts
        self._video_limits = video_limits
        self._caches = caches
        self._processor = threading.Lock()
        self._flights = _Flights()

    def image(self, image: Image, salt: str) -> MediaItem:
        """Raises InvalidImage if it has to be decoded and can't be."""
        bound = image.max_side_pixels
        is_larger = bound is not None and max(image.width, image.height) > bound
        key = self._key("image", salt, image.content_hash, bound if is_larger else None)
        return self._item(key, image.param, lambda: self._image(decode_rgb(image), image.param))

    def video(self, video: Video, salt: str, cancellation: Cancellation) -> MediaItem:
        """A video for a family that takes videos. Raises InvalidVideo if it can't be read."""
        limits = self._video_limits
        return self._item(
            self._video_key(video, salt, limits),
            video.param,
            lambda: self._video(clip.decode(video, limits, cancellation), video.param),
        )

    def frames(
        self, video: Video, salt: str, cancellation: Cancellation
    ) -> Iterator[tuple[float, MediaItem]]:
        """A video as images, each with its time in seconds. Raises InvalidVideo like `video`."""
        max_frames = min(self._video_limits.max_frames, _MAX_FRAMES_AS_IMAGES)
        limits = msgspec.structs.replace(self._video_limits, max_frames=max_frames)
        key = self._video_key(video, salt, limits)
        decoded = cache(lambda: clip.decode(video, limits, cancellation))
        seconds: tuple[float, ...] | None = self._caches.token_layouts.get(key)
        if seconds is None:
            seconds = decoded().seconds
            self._caches.token_layouts.put(key, seconds, 100 * len(seconds)).release()

        def frame(number: int) -> Processed:
            return self._image(PillowImage.fromarray(decoded().frames[number]), video.param)

        for number, time in enumerate(seconds):
            yield time, self._item(f"{key}/{number}", video.param, partial(frame, number))

    @property
    def num_in_flight(self) -> int:
        """Media items that a thread works on, or waits for."""
        return len(self._flights)

    def _image(self, image: PillowImage.Image, param: str) -> Processed:
        with self._processor:
            return process_image(self._host, self._prompts.placeholder, image, param)

    def _video(self, decoded: clip.Clip, param: str) -> Processed:
        token_id, placeholder = self._host.video_token_id, self._prompts.video_placeholder
        assert token_id is not None
        assert placeholder is not None
        with self._processor:
            return process_video(self._host, token_id, placeholder, decoded, param)

    def _item(self, key: str, param: str, load: Callable[[], Processed]) -> MediaItem:
        once = cache(partial(self._processed, key, load))
        layout: TokenLayout | None = self._caches.token_layouts.get(key)
        return MediaItem(key, layout or once().layout, param, once)

    def _processed(self, key: str, load: Callable[[], Processed]) -> Processed:
        with self._flights.one(key):
            made: Processed | None = self._caches.pixels.get(key)
            if made is None:
                made = load()
                self._caches.pixels.put(key, made, made.size_bytes).release()
                self._caches.token_layouts.put(key, made.layout, made.layout.size_bytes).release()
        return made

    def _video_key(self, video: Video, salt: str, limits: VideoLimits) -> str:
        """Names the sampled frames. A GIF may be an image or a video, with different keys."""
        chosen = (limits.fps, limits.max_frames, limits.max_side_pixels)
        return self._key("video", salt, video.content_hash, *chosen)

    def _key(self, *parts: str | float | None) -> str:
        text = "\0".join([self._host.fingerprint, *map(str, parts)])
        return hashlib.sha256(text.encode()).hexdigest()


class _Flights:
    """Lets one thread at a time work on the same key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[str, tuple[threading.Lock, int]] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._keys)

    @contextmanager
    def one(self, key: str) -> Iterator[None]:
        with self._lock:
            lock, waiting = self._keys.get(key, (threading.Lock(), 0))
            self._keys[key] = lock, waiting + 1
        try:
            with lock:
                yield
        finally:
            with self._lock:
                lock, waiting = self._keys.pop(key)
                if waiting > 1:
                    self._keys[key] = lock, waiting - 1
