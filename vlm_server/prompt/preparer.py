"""Prepares a request: token ids, M-RoPE positions, and pixel arrays where no cache has features.

The whole prompt is tokenized with one token for each image and video, then those are expanded.
The caches are asked before any pixel is needed. A family that takes no videos is shown the frames
as images, each with its time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from vlm_server.cache.caches import Caches
from vlm_server.cache.prompt_key import MediaSpan
from vlm_server.errors import ContextLengthExceeded, InternalError
from vlm_server.ports import HostModel, ImageSpan, PreparedPrompt
from vlm_server.prompt.chunking import atomic_prefill_tokens
from vlm_server.prompt.grammar import Grammars
from vlm_server.prompt.media import MediaItem, MediaProcessor
from vlm_server.prompt.positions import prompt_positions
from vlm_server.prompt.snapshot_points import SnapshotPoints
from vlm_server.prompt.tokenizer import Placeholder, PromptTokenizer
from vlm_server.protocol import ContentPart, ImagePart, Message, Submit, TextPart, VideoPart
from vlm_server.settings import Video as VideoLimits
from vlm_server.video import clip


class MultimodalPreparer:
    """The `Preparer` of one model. Thread-safe."""

    def __init__(
        self, host: HostModel, video_limits: VideoLimits, grammars: Grammars, caches: Caches
    ) -> None:
        self._host = host
        self._grammars = grammars
        self._caches = caches
        self._prompts = PromptTokenizer(host)
        self._snapshot_points = SnapshotPoints(self._prompts)
        self._media = MediaProcessor(host, self._prompts, video_limits, caches)
        self._stops: dict[str, clip.Stop] = {}

    def prepare(self, submit: Submit) -> PreparedPrompt:
        """Token ids with the spans of images and videos, and what the caches have of them.

        Raises InvalidImage and InvalidVideo for what can't be read, ContextLengthExceeded for
        more than fits, and what `Grammars.compile` and `PromptTokenizer.tokenize` do.
        """
        schema = submit.sampling.json_schema
        stop = self._stops[submit.request_id] = clip.Stop()
        try:
            grammar = None if schema is None else self._grammars.compile(schema)
            messages, media = self._lay_out(submit, stop)
            layouts = [item.layout for item in media]
            placeholders = [
                Placeholder(each.token_id, each.prefix, each.suffix) for each in layouts
            ]
            prompt = self._expand(self._prompts.tokenize(messages, placeholders), media)
            prompt = self._with_chunk_policy(prompt)
            if self._caches.prefixes.needs_snapshots:
                snapshot_points = self._snapshot_points.of(messages, prompt.token_ids, prompt.spans)
                first = bisect_left(snapshot_points, prompt.atomic_prefill_tokens)
                prompt = replace(prompt, snapshot_points=snapshot_points[first:])
            prompt = replace(prompt, grammar=grammar, cache_salt=submit.cache_salt)
            return self._with_images(prompt, media)
        finally:
            del self._stops[submit.request_id]

    @property
    def num_tracked(self) -> int:
        """Requests and media items that are being prepared."""
        return len(self._stops) + self._media.num_in_flight

    def abandon(self, request_id: str) -> None:
        """End the decoding of a video that nobody waits for."""
        if stop := self._stops.get(request_id):
            stop.set()

    def _lay_out(self, submit: Submit, stop: clip.Stop) -> tuple[list[Message], list[MediaItem]]:
        """The messages for the chat template, and their media items in order.

        One item after the other, so that no two are in memory decoded.
        """
        messages: list[Message] = []
        media: list[MediaItem] = []
        num_tokens, limit = 0, self._host.context_tokens
        for message in submit.messages:
            parts: list[ContentPart] = []
            for part, item in self._lay_out_parts(submit, message, stop):
                parts.append(part)
                if item is None:
                    continue
                media.append(item)
                num_tokens += len(item.layout.token_ids)
                if num_tokens >= limit:
                    raise ContextLengthExceeded(
                        f"the pictures and videos up to this one have {num_tokens} tokens; "
                        f"this model's context holds {limit}",
                        item.param,
                    )
            messages.append(Message(message.role, tuple(parts)))
        return messages, media

    def _lay_out_parts(
        self, submit: Submit, message: Message, stop: clip.Stop
    ) -> Iterator[tuple[ContentPart, MediaItem | None]]:
        salt = submit.cache_salt
        for part in message.content:
            match part:
                case TextPart():
                    yield part, None
                case ImagePart(index):
                    yield part, self._media.image(submit.images[index], salt)
                case VideoPart(index) if self._prompts.video_placeholder:
                    yield part, self._media.video(submit.videos[index], salt, stop)
                case VideoPart(index):
                    for time, frame in self._media.frames(submit.videos[index], salt, stop):
                        yield TextPart(f"\nFrame at {time:.1f} s:"), None
                        yield ImagePart(0), frame

    def _expand(self, token_ids: list[int], media: list[MediaItem]) -> PreparedPrompt:
        """Replace each media item's token by all of its tokens, and note the spans."""
        ids = np.array(token_ids, dtype=np.int32)
        kinds = [item.layout.token_id for item in media]
        indices = np.flatnonzero(np.isin(ids, kinds))
        if ids[indices].tolist() != kinds:
            raise InternalError(f"{len(media)} pictures have {len(indices)} tokens in the prompt")
        parts, spans, placed, cursor, length = [], list[MediaSpan](), [], 0, 0
        for index, item in zip(indices, media, strict=True):
            text, layout = ids[cursor:index], item.layout
            start = length + len(text)
            cursor, length = int(index) + 1, start + len(layout.token_ids)
            parts += [text, layout.token_ids]
            placed += [(start, layout.positions)] if layout.positions is not None else []
            for (first, last), mm_hash in zip(layout.units, item.mm_hashes, strict=True):
                spans.append(MediaSpan(start + first, start + last, mm_hash))
        whole = np.concatenate([*parts, ids[cursor:]])
        if self._host.mrope is None:
            return PreparedPrompt(whole, spans=tuple(spans))
        positions, rope_delta = prompt_positions(len(whole), placed)
        return PreparedPrompt(whole, (), tuple(spans), positions, rope_delta)

    def _with_chunk_policy(self, prompt: PreparedPrompt) -> PreparedPrompt:
        """`prompt` with what has to be prefilled at once."""
        token_types = np.isin(prompt.token_ids, self._host.media_token_ids).astype(np.int32)
        count = atomic_prefill_tokens(self._host.chunk_policy, token_types)
        if not count:
            return prompt
        return replace(prompt, atomic_prefill_tokens=count, token_types=token_types)

    def _with_images(self, prompt: PreparedPrompt, media: list[MediaItem]) -> PreparedPrompt:
        """`prompt` with what is known of its beginning, and what the rest of it needs."""
        limit = 0 if prompt.is_atomic else prompt.num_tokens - 1
        prefix = self._caches.match_prefix(
            prompt.elements, limit, prompt.cache_salt, prompt.atomic_prefill_tokens
        )
        units = [(medium, unit) for medium in media for unit in range(len(medium.mm_hashes))]
        images = list[ImageSpan]()
        try:
            for span, (medium, unit) in zip(prompt.spans, units, strict=True):
                if span.start >= prefix.length:
                    images.append(self._image(span, medium, unit))
        except BaseException:
            replace(prompt, images=tuple(images), prefix=prefix).release()
            raise
        return replace(prompt, images=tuple(images), prefix=prefix)

    def _image(self, span: MediaSpan, medium: MediaItem, unit: int) -> ImageSpan:
        features = self._caches.lease_features(span.key)
        inputs = medium.inputs(unit) if features is None else {}
        return ImageSpan(span.start, span.end, span.key, inputs, features)
