"""Prepares a request: token ids, M-RoPE positions, and pixel arrays where no cache has features.

The whole prompt is tokenized with one token for each image and video, then those are expanded. The
caches are asked before any pixel is needed. A family that takes no videos is shown the frames as
images, each with its time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vlm_server.cache.caches import Caches
from vlm_server.cache.holds import CacheHolds
from vlm_server.cache.prompt_key import MediaSpan
from vlm_server.child.cancellation import Cancellation
from vlm_server.errors import ContextLengthExceeded, InternalError
from vlm_server.host_model import HostModel
from vlm_server.ports import AnswerFormat, Grammar, MediaInputs, Prepared, PreparedPrompt
from vlm_server.prompt.atomic_prefill import atomic_prefill_tokens
from vlm_server.prompt.grammar.constraints import Constraints
from vlm_server.prompt.grammar.grammars import Grammars
from vlm_server.prompt.media.decoders import DecodeBudget, Decoders
from vlm_server.prompt.media.processor import MediaItem, MediaProcessor
from vlm_server.prompt.positions import prompt_positions
from vlm_server.prompt.snapshot_points import SnapshotPoints
from vlm_server.prompt.thinking import thinking
from vlm_server.prompt.thought_marks import ThoughtMarks
from vlm_server.prompt.tokenizer import Placeholder, PromptTokenizer
from vlm_server.protocol import ContentPart, ImagePart, Message, Submit, TextPart, VideoPart


class MultimodalPreparer:
    """The `Preparer` of one model. Thread-safe."""

    def __init__(
        self, host: HostModel, decoders: Decoders, grammars: Grammars, caches: Caches
    ) -> None:
        self._host = host
        self._constraints = Constraints(host)
        self._grammars = grammars
        marks = host.reasoning_format
        self._marks = None if marks is None else ThoughtMarks(host, marks)
        self._caches = caches
        self._prompts = PromptTokenizer(host)
        self._snapshot_points = SnapshotPoints(self._prompts)
        self._media = MediaProcessor(host, self._prompts, decoders, caches)

    def prepare(
        self, submit: Submit, cancellation: Cancellation, *, use_disk: bool = True
    ) -> Prepared:
        """The prompt of a request, what the caches have of it, and pixels for the rest.

        Raises InvalidImage and InvalidVideo for what can't be read, DecodeBudgetExceeded and
        ContextLengthExceeded for more than a request may have, Cancelled between two steps, and
        what `Constraints.of`, `Grammars.compile` and `PromptTokenizer.tokenize` do.
        """
        cancellation.check()
        grammar = self._grammar(submit, cancellation)
        messages, media = self._lay_out(submit, self._media.begin(cancellation))
        cancellation.check()
        layouts = [item.layout for item in media]
        placeholders = [Placeholder(each.token_id, each.prefix, each.suffix) for each in layouts]
        expanded = _expand(self._prompts.tokenize(messages, placeholders), media)
        answer_format = AnswerFormat()
        grammar = thinking(self._marks, grammar, submit, starts=answer_format.starts_in_thought)
        prompt = self._build(expanded, messages, grammar, submit.cache_salt)
        return self._look_up(prompt, media, use_disk=use_disk)

    def pixels_to_decode(self, submit: Submit) -> int:
        """About how many pixels the images of a request have that no cache knows."""
        return self._media.pixels_to_decode(submit)

    def _grammar(self, submit: Submit, cancellation: Cancellation) -> Grammar | None:
        constraint = self._constraints.of(submit)
        if constraint is None:
            return None
        return self._grammars.compile(constraint, submit.cache_salt, cancellation)

    @property
    def num_tracked(self) -> int:
        """Media items that are being decoded or processed, or waited for."""
        return self._media.num_in_flight

    def _lay_out(
        self, submit: Submit, budget: DecodeBudget
    ) -> tuple[list[Message], list[MediaItem]]:
        """The messages for the chat template, and their media items in order.

        One item after the other, so that no two are in memory decoded.
        """
        messages: list[Message] = []
        media: list[MediaItem] = []
        num_tokens, limit = 0, self._host.context_tokens
        for message in submit.messages:
            parts: list[ContentPart] = []
            for part, item in self._lay_out_parts(submit, message, budget):
                parts.append(part)
                if item is None:
                    continue
                media.append(item)
                num_tokens += len(item.layout.token_ids)
                if num_tokens >= limit:
                    raise ContextLengthExceeded(
                        f"The images and videos up to this one have {num_tokens} tokens; "
                        f"this model's context holds {limit}.",
                        item.param,
                    )
            messages.append(Message(message.role, tuple(parts)))
        return messages, media

    def _lay_out_parts(
        self, submit: Submit, message: Message, budget: DecodeBudget
    ) -> Iterator[tuple[ContentPart, MediaItem | None]]:
        salt, cancellation = submit.cache_salt, budget.cancellation
        for part in message.content:
            cancellation.check()
            match part:
                case TextPart():
                    yield part, None
                case ImagePart(index):
                    yield part, self._media.image(submit.images[index], salt, budget)
                case VideoPart(index) if self._prompts.video_placeholder:
                    yield part, self._media.video(submit.videos[index], salt, cancellation)
                case VideoPart(index):
                    video = submit.videos[index]
                    for time, frame in self._media.frames(video, salt, cancellation):
                        yield TextPart(f"\nFrame at {time:.1f} s:"), None
                        yield ImagePart(0), frame

    def _build(
        self, expanded: _Expanded, messages: Sequence[Message], grammar: Grammar | None, salt: str
    ) -> PreparedPrompt:
        token_ids, spans = expanded.token_ids, expanded.spans
        positions, rope_delta = None, 0
        if self._host.mrope is not None:
            positions, rope_delta = prompt_positions(len(token_ids), expanded.positions)
        token_types = np.isin(token_ids, self._host.media_token_ids).astype(np.int32)
        num_atomic = atomic_prefill_tokens(self._host.chunk_policy, token_types)
        snapshot_points: tuple[int, ...] = ()
        if self._caches.prefixes.needs_snapshots:
            points = self._snapshot_points.of(messages, token_ids, spans, salt)
            snapshot_points = points[bisect_left(points, num_atomic) :]
        return PreparedPrompt(
            token_ids=token_ids,
            spans=spans,
            positions=positions,
            rope_delta=rope_delta,
            snapshot_points=snapshot_points,
            atomic_prefill_tokens=num_atomic,
            token_types=token_types if num_atomic else None,
            grammar=grammar,
            cache_salt=salt,
        )

    def _look_up(
        self, prompt: PreparedPrompt, media: list[MediaItem], *, use_disk: bool
    ) -> Prepared:
        """Hold what the caches have of `prompt`, and process the media that none has.

        Nothing is read from disk here: memory is reserved for that first.
        """
        holds = CacheHolds(
            self._caches, prompt.key, prompt.cache_salt, prompt.atomic_prefill_tokens
        )
        units = [(item, unit) for item in media for unit in range(len(item.mm_hashes))]
        inputs: dict[int, MediaInputs] = {}
        try:
            load = holds.look_up(on_disk=use_disk)
            for index in list(holds.missing()):
                if load is None or not load.covers(index):
                    item, unit = units[index]
                    inputs[index] = item.inputs(unit)
        except BaseException:
            holds.release()
            raise
        return Prepared(prompt, holds, inputs, load)


@dataclass(frozen=True, slots=True)
class _Expanded:
    """A prompt with all tokens of its media.

    token_ids: (tokens,) int32. spans: what is encoded at once, in order. positions: the first token
    and the M-RoPE positions, (3, tokens), of each media item, for families that have any.
    """

    token_ids: NDArray[np.int32]
    spans: tuple[MediaSpan, ...]
    positions: tuple[tuple[int, NDArray[np.int32]], ...]


def _expand(token_ids: list[int], media: list[MediaItem]) -> _Expanded:
    """Replace each media item's token by all of its tokens, and note its spans."""
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
        for (first, last), mm_hash in zip(layout.units, item.mm_hashes, strict=True):
            spans.append(MediaSpan(start + first, start + last, mm_hash))
    return _Expanded(np.concatenate([*parts, ids[cursor:]]), tuple(spans), tuple(placed))
