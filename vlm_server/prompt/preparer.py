"""A request to token ids and pixel arrays. Knows the order of its parts; keeps no mlx array.

The whole prompt is tokenized with one token for each picture and video, then those are
expanded. What the caches know of it is looked up before any pixel is needed. A family that
knows no videos is shown the frames as pictures, each with its time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from vlm_server.cache.caches import Caches
from vlm_server.cache.holds import CacheHolds
from vlm_server.cache.prompt_key import MediaSpan
from vlm_server.errors import ContextLengthExceeded, InternalError
from vlm_server.ports import Cancellation, MediaInputs, Prepared, PreparedPrompt
from vlm_server.prompt.grammar import Grammars
from vlm_server.prompt.media import MediaItem, MediaProcessor
from vlm_server.prompt.positions import has_positions, prompt_positions
from vlm_server.prompt.snapshot_points import SnapshotPoints
from vlm_server.prompt.tokenizer import Placeholder, PromptTokenizer
from vlm_server.protocol import ContentPart, ImagePart, Message, Submit, TextPart, VideoPart
from vlm_server.runner.model.chunking import atomic_prefill_tokens
from vlm_server.runner.model.load import LoadedModel
from vlm_server.settings import Engine
from vlm_server.settings import Video as VideoLimits


class MultimodalPreparer:
    """The `Preparer` of one loaded model. Thread-safe."""

    def __init__(
        self,
        loaded: LoadedModel,
        video_limits: VideoLimits | None = None,
        grammars: Grammars | None = None,
        caches: Caches | None = None,
    ) -> None:
        self._loaded = loaded
        self._grammars = grammars or Grammars(loaded, Engine().schema_timeout_seconds)
        self._caches = caches or Caches.of()
        self._prompts = PromptTokenizer(loaded)
        self._snapshot_points = SnapshotPoints(self._prompts)
        self._media = MediaProcessor(
            loaded, self._prompts, video_limits or VideoLimits(), self._caches
        )

    def prepare(self, submit: Submit, cancellation: Cancellation) -> Prepared:
        """Token ids with the spans of pictures and videos, and what the caches have of them.

        Raises InvalidImage and InvalidVideo for what can't be read, ContextLengthExceeded for
        more than fits, and what `Grammars.compile` and `PromptTokenizer.tokenize` do.
        """
        schema = submit.sampling.json_schema
        grammar = None if schema is None else self._grammars.compile(schema)
        messages, media = self._lay_out(submit, cancellation)
        token_layouts = [medium.layout for medium in media]
        places = [Placeholder(each.token_id, each.prefix, each.suffix) for each in token_layouts]
        prompt = self._expand(self._prompts.tokenize(messages, places), media)
        prompt = self._uncut(prompt)
        if self._caches.prefixes.needs_snapshots:
            snapshot_points = self._snapshot_points.of(messages, prompt.token_ids, prompt.spans)
            uncut = prompt.atomic_prefill_tokens
            prompt = replace(
                prompt, snapshot_points=snapshot_points[bisect_left(snapshot_points, uncut) :]
            )
        prompt = replace(prompt, grammar=grammar, cache_salt=submit.cache_salt)
        return self._look_up(prompt, media)

    @property
    def num_tracked(self) -> int:
        """Media that somebody works on, or waits for."""
        return self._media.num_in_flight

    def _lay_out(
        self, submit: Submit, cancellation: Cancellation
    ) -> tuple[list[Message], list[MediaItem]]:
        """The messages as the template shall see them, and what stands in them, in order.

        One after the other, so that no two are in memory decoded.
        """
        messages: list[Message] = []
        media: list[MediaItem] = []
        num_tokens, limit = 0, self._loaded.context_tokens
        for message in submit.messages:
            parts: list[ContentPart] = []
            for part, medium in self._lay_out_parts(submit, message, cancellation):
                parts.append(part)
                if medium is None:
                    continue
                media.append(medium)
                num_tokens += len(medium.layout.token_ids)
                if num_tokens >= limit:
                    raise ContextLengthExceeded(
                        f"the pictures and videos up to this one have {num_tokens} tokens; "
                        f"this model's context holds {limit}",
                        medium.param,
                    )
            messages.append(Message(message.role, tuple(parts)))
        return messages, media

    def _lay_out_parts(
        self, submit: Submit, message: Message, cancellation: Cancellation
    ) -> Iterator[tuple[ContentPart, MediaItem | None]]:
        salt = submit.cache_salt
        for part in message.content:
            match part:
                case TextPart():
                    yield part, None
                case ImagePart(index):
                    yield part, self._media.picture(submit.images[index], salt)
                case VideoPart(index) if self._prompts.video_placeholder:
                    yield part, self._media.video(submit.videos[index], salt, cancellation)
                case VideoPart(index):
                    for time, frame in self._media.frames(submit.videos[index], salt, cancellation):
                        yield TextPart(f"\nFrame at {time:.1f} s:"), None
                        yield ImagePart(0), frame

    def _expand(self, token_ids: list[int], media: list[MediaItem]) -> PreparedPrompt:
        """Replace each medium's token by all of its tokens, and note the spans."""
        ids = np.array(token_ids, dtype=np.int32)
        kinds = [medium.layout.token_id for medium in media]
        places = np.flatnonzero(np.isin(ids, kinds))
        if ids[places].tolist() != kinds:
            raise InternalError(f"{len(media)} pictures have {len(places)} places in the prompt")
        pieces, spans, placed, cursor, length = [], list[MediaSpan](), [], 0, 0
        for place, medium in zip(places, media, strict=True):
            text, layout = ids[cursor:place], medium.layout
            start = length + len(text)
            cursor, length = int(place) + 1, start + len(layout.token_ids)
            pieces += [text, layout.token_ids]
            placed += [(start, layout.positions)] if layout.positions is not None else []
            for (first, last), mm_hash in zip(layout.units, medium.mm_hashes, strict=True):
                spans.append(MediaSpan(start + first, start + last, mm_hash))
        whole = np.concatenate([*pieces, ids[cursor:]])
        if not has_positions(self._loaded.language_model):
            return PreparedPrompt(whole, spans=tuple(spans))
        positions, rope_delta = prompt_positions(len(whole), placed)
        return PreparedPrompt(whole, tuple(spans), positions, rope_delta)

    def _uncut(self, prompt: PreparedPrompt) -> PreparedPrompt:
        """`prompt` with what the family says of cutting it into chunks."""
        image_token_id, video_token_id = self._loaded.image_token_id, self._loaded.video_token_id
        media_ids = [i for i in (image_token_id, video_token_id) if i is not None]
        token_types = np.isin(prompt.token_ids, media_ids).astype(np.int32)
        count = atomic_prefill_tokens(self._loaded.model, token_types)
        if not count:
            return prompt
        return replace(prompt, atomic_prefill_tokens=count, token_types=token_types)

    def _look_up(self, prompt: PreparedPrompt, media: list[MediaItem]) -> Prepared:
        """Hold what the caches have of `prompt`, and process the media that none has."""
        holds = CacheHolds(
            self._caches, prompt.key, prompt.cache_salt, prompt.atomic_prefill_tokens
        )
        units = [(item, unit) for item in media for unit in range(len(item.mm_hashes))]
        inputs: dict[int, MediaInputs] = {}
        try:
            for index in list(holds.missing()):
                if not holds.lease_features(index, from_disk=True):
                    item, unit = units[index]
                    inputs[index] = item.inputs(unit)
        except BaseException:
            holds.release()
            raise
        return Prepared(prompt, holds, inputs)
