"""The preparation of a request: token ids, M-RoPE positions, and pixel arrays of uncached media.

The prompt is tokenized with one token for each image and video, which are then expanded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from vlm_server.cache.caches import Caches
from vlm_server.cache.references import CacheReferences
from vlm_server.errors import InvalidRequest
from vlm_server.interfaces import AnswerFormat, Grammar, MediaInputs, Prepared, PreparedPrompt
from vlm_server.interfaces.model_spec import ChunkPolicy, ModelSpec
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.prompt.document_uses import Room, document_uses, media_too_long
from vlm_server.prompt.grammar.constraints import Constraints
from vlm_server.prompt.grammar.grammar_cache import Grammars
from vlm_server.prompt.grammar.reasoning_grammar import with_reasoning
from vlm_server.prompt.grammar.reasoning_marks import ReasoningMarks
from vlm_server.prompt.media.decoders import DecodeBudget, Decoders
from vlm_server.prompt.media.processor import MediaItem, MediaProcessor, images_used, videos_used
from vlm_server.prompt.media.spans import expand, whole_items
from vlm_server.prompt.pooling import pooling_chat, texts_of, vector_key
from vlm_server.prompt.positions import prompt_positions
from vlm_server.prompt.questions import as_last_turn, shared_tokens, with_options, with_snapshot
from vlm_server.prompt.snapshot_points import SnapshotPoints
from vlm_server.prompt.template.chat import Chat, field_of, read_chat
from vlm_server.prompt.tokenizer import PromptTokenizer
from vlm_server.protocol import (
    ContentPart,
    ImagePart,
    Message,
    Pooling,
    Submit,
    TextPart,
    VideoPart,
)

_TAIL_TOKENS = 32
"""The end of a prompt in which the start mark of reasoning is looked for."""


class MultimodalPreparer:
    """The `Preparer` of one model. Thread-safe."""

    def __init__(
        self, spec: ModelSpec, decoders: Decoders, grammars: Grammars, caches: Caches
    ) -> None:
        self._spec = spec
        self._constraints = Constraints(spec)
        self._grammars = grammars
        marks = spec.reasoning_format
        self._marks = None if marks is None else ReasoningMarks(spec, marks)
        self._caches = caches
        self._prompts = PromptTokenizer(spec)
        self._snapshot_points = SnapshotPoints(self._prompts)
        self._media = MediaProcessor(spec, self._prompts.template, decoders, caches)

    @property
    def num_tracked(self) -> int:
        """Media items that are being decoded or processed, or waited for."""
        return self._media.num_in_flight

    def pixels_to_decode(self, submit: Submit) -> int:
        """The approximate number of pixels of a request's images that are not cached."""
        return self._media.pixels_to_decode(submit)

    def prepare(
        self, submit: Submit, cancellation: Cancellation, *, use_disk: bool = True
    ) -> Prepared:
        """The prompt of a request, its cache entries, and pixels for the rest.

        Raises InvalidImage, InvalidVideo, DecodeBudgetExceeded, ContextLengthExceeded, Cancelled
        between two steps, and the errors of constraints, grammars and `PromptTokenizer`. A request
        that is only counted gets no grammar and no pixels.
        """
        cancellation.check()
        self._check_media(submit)
        if submit.pooling is not None and submit.pooling.task == "decide":
            return self._prepare_question(submit, cancellation, use_disk=use_disk)
        if submit.pooling is not None and not submit.count_only:
            return self._prepare_input(submit, submit.pooling, cancellation, use_disk=use_disk)
        if submit.prompt is not None:
            return self._prepare_raw(submit, submit.prompt, cancellation, use_disk=use_disk)
        grammar = self._grammar(submit, cancellation)
        arranged, answer_format = self._arrange(submit)
        chat, media = self._lay_out(submit, arranged, self._media.begin(cancellation))
        cancellation.check()
        token_ids = self._prompts.tokenize(chat, [item.layout for item in media])
        if self._starts_in_reasoning(chat, token_ids):
            answer_format = replace(answer_format, starts_in_reasoning=True)
        starts = answer_format.starts_in_reasoning
        prompt = replace(
            self._build(token_ids, media, chat, submit),
            answer_format=answer_format,
            images=images_used(media),
            videos=videos_used(media),
            documents=document_uses(media),
            param=field_of(submit.messages),
        )
        if submit.count_only:
            return self._count(prompt)
        prompt = replace(
            prompt,
            grammar=with_reasoning(self._marks, grammar, submit, starts=starts),
            prediction=self._prompts.tokenize_prediction(submit.prediction),
        )
        return self._look_up(prompt, media, use_disk=use_disk)

    def _check_media(self, submit: Submit) -> None:
        """Raises InvalidRequest for media, if the model reads text alone."""
        params = [each.param for each in submit.images] + [each.param for each in submit.videos]
        if params and not self._spec.reads_images:
            kind = "image" if submit.images else "video"
            message = f"{self._spec.family} reads text alone: remove the {kind}, or ask a model"
            raise InvalidRequest(f"{message} that reads images", params[0])

    def _prepare_raw(
        self,
        submit: Submit,
        raw_prompt: str | tuple[int, ...],
        cancellation: Cancellation,
        *,
        use_disk: bool,
    ) -> Prepared:
        """The preparation of a prompt given as text or token ids."""
        if isinstance(raw_prompt, str):
            token_ids = self._prompts.tokenize_text(raw_prompt)
        else:
            token_ids = self._prompts.check_ids(raw_prompt, allows_media=submit.count_only)
        if not token_ids:
            raise InvalidRequest("The prompt has no tokens.", "prompt")
        if submit.count_only:
            text = "" if isinstance(raw_prompt, str) else self._prompts.text_of(raw_prompt)
            ids = np.array(token_ids, dtype=np.int32)
            return self._count(PreparedPrompt(ids, text=text, **self._apart(submit)))
        grammar = self._grammar(submit, cancellation)
        prompt = self._build(token_ids, [], Chat(()), submit)
        prompt = replace(prompt, grammar=grammar, answer_format=None)
        return self._look_up(prompt, [], use_disk=use_disk)

    def _prepare_input(
        self, submit: Submit, pooling: Pooling, cancellation: Cancellation, *, use_disk: bool
    ) -> Prepared:
        """The preparation of an input to embed, after the prompt of its type, or to score."""
        (given,) = submit.inputs
        media: list[MediaItem] = []
        chat, token_types = Chat(()), None
        if submit.prompt is not None:
            token_ids = self._checked_ids(submit.prompt, given.param)
        elif not self._spec.writes and self._spec.scores is not None:
            token_ids, types = self._prompts.tokenize_pair(*texts_of(submit), given.param)
            token_types = types if self._spec.scores.has_types else None
        else:
            chat = self._prompts.template.arrange(pooling_chat(self._spec, submit, pooling))
            chat, media = self._lay_out(submit, chat, self._media.begin(cancellation))
            cancellation.check()
            token_ids = self._prompts.tokenize(chat, [item.layout for item in media])
        if not token_ids:
            raise InvalidRequest("This input has no tokens.", given.param)
        prompt = self._build(token_ids, media, chat, submit)
        prompt = replace(
            prompt,
            token_types=token_types,
            answer_format=None,
            images=images_used(media),
            videos=videos_used(media),
            param=given.param,
        )
        prompt = replace(prompt, vector_key=vector_key(prompt))
        vectors = self._caches.vectors.get(prompt.vector_key)
        if vectors is not None:
            return Prepared(prompt, self._references(prompt), vectors=vectors)
        return self._look_up(prompt, media, use_disk=use_disk)

    def _prepare_question(
        self, submit: Submit, cancellation: Cancellation, *, use_disk: bool
    ) -> Prepared:
        """The preparation of a question about a conversation, and of its options.

        The options follow where an answer without reasoning begins.
        """
        (given,) = submit.inputs
        arranged, _ = self._arrange(as_last_turn(submit))
        chat, media = self._lay_out(submit, arranged, self._media.begin(cancellation))
        layouts = [item.layout for item in media]
        cancellation.check()
        token_ids = self._prompts.tokenize(chat, layouts)
        if self._marks is not None:
            starts = self._starts_in_reasoning(chat, token_ids)
            token_ids += self._marks.ids_before_text(starts=starts)
        prompt = self._build(token_ids, media, chat, submit)
        if self._caches.prefixes.needs_snapshots:
            shared = shared_tokens(self._prompts, chat, layouts, token_ids)
            point = shared + prompt.num_tokens - len(token_ids)
            prompt = with_snapshot(prompt, point, has_states=self._spec.has_states)
        prompt = replace(
            prompt,
            answer_format=None,
            images=images_used(media),
            videos=videos_used(media),
            documents=document_uses(media),
            param=given.param,
        )
        option_ids = self._prompts.tokenize_options(
            given.options, token_ids, given.param, given.num_spellings
        )
        return self._look_up(with_options(prompt, option_ids), media, use_disk=use_disk)

    def _checked_ids(self, token_ids: str | tuple[int, ...], param: str) -> list[int]:
        assert not isinstance(token_ids, str)
        try:
            return self._prompts.check_ids(token_ids)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param) from None

    def _count(self, prompt: PreparedPrompt) -> Prepared:
        """`prompt` for counting: with its prefix cache hits, without inputs."""
        return Prepared(prompt, self._references(prompt))

    def _references(self, prompt: PreparedPrompt) -> CacheReferences:
        num_atomic = prompt.atomic_prefill_tokens
        return CacheReferences(self._caches, prompt.key, prompt.prefix_salt, num_atomic)

    def _grammar(self, submit: Submit, cancellation: Cancellation) -> Grammar | None:
        constraint = None if submit.count_only else self._constraints.constraint_on(submit)
        if constraint is None:
            return None
        return self._grammars.compile(constraint, submit.cache_salt, cancellation)

    def _arrange(self, submit: Submit) -> tuple[Chat, AnswerFormat]:
        """The conversation as the chat template takes it, and the format of the answer."""
        chat, tools = read_chat(submit), submit.tools
        is_required = tools is not None and tools.choice == "required"
        if chat.tools and not is_required and self._spec.tool_parser is None:
            raise InvalidRequest(
                "this model's format of tool calls is not supported; use `tool_choice` with "
                "'required' or a named tool",
                "tools",
            )
        answer_format = AnswerFormat(
            tools=chat.tools, is_required=is_required, parallel=tools is None or tools.parallel
        )
        parser = self._spec.tool_parser
        marks = (parser.start, parser.end) if parser and parser.needs_instruction else None
        arranged = self._prompts.template.arrange(chat, must_call=is_required, marks=marks)
        return arranged, answer_format

    def _starts_in_reasoning(self, chat: Chat, token_ids: Sequence[int]) -> bool:
        """Whether the prompt ends inside reasoning, of the template or of a continued message."""
        marks = self._spec.reasoning_format
        if marks is None:
            return False
        if chat.continue_final:
            parts = chat.messages[-1].content
            text = "".join(part.text for part in parts if isinstance(part, TextPart))
            if text.rfind(marks.start) > text.rfind(marks.end):
                return True
        tail = self._prompts.text_of(token_ids[-_TAIL_TOKENS:]).rstrip()
        return bool(marks.start) and tail.endswith(marks.start)

    def _lay_out(
        self, submit: Submit, chat: Chat, budget: DecodeBudget
    ) -> tuple[Chat, list[MediaItem]]:
        """The conversation for the chat template, and its media items, decoded one by one."""
        messages: list[Message] = []
        media: list[MediaItem] = []
        num_tokens, limit = 0, self._spec.context_tokens
        for message in chat.messages:
            parts: list[ContentPart] = []
            for part, item in self._lay_out_parts(submit, message, budget):
                parts.append(part)
                if item is None:
                    continue
                media.append(item)
                num_tokens += len(item.layout.token_ids)
                if num_tokens >= limit:
                    raise media_too_long(submit, media, self._room(submit))
            messages.append(structs.replace(message, content=tuple(parts)))
        return replace(chat, messages=tuple(messages)), media

    def _room(self, submit: Submit) -> Room:
        rule = self._spec.pixel_rule
        num_tokens = self._prompts.count("".join(submit.texts()))
        return Room(self._spec.context_tokens, num_tokens, rule.min_pixels if rule else 0)

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
                case VideoPart(index) if self._prompts.template.video_placeholder:
                    yield part, self._media.video(submit.videos[index], salt, cancellation)
                case VideoPart(index):
                    video = submit.videos[index]
                    for time, frame in self._media.frames(video, salt, cancellation):
                        yield TextPart(f"\nFrame at {time:.1f} s:"), None
                        yield ImagePart(0), frame

    def _build(
        self, prompt_ids: list[int], media: list[MediaItem], chat: Chat, submit: Submit
    ) -> PreparedPrompt:
        token_ids, spans, media_positions = expand(prompt_ids, media)
        positions, rope_delta = None, 0
        if self._spec.mrope is not None:
            positions, rope_delta = prompt_positions(len(token_ids), media_positions)
        token_types = np.isin(token_ids, self._spec.media_token_ids).astype(np.int32)
        num_atomic = atomic_prefill_tokens(self._spec.chunk_policy, token_types)
        snapshot_points: tuple[int, ...] = ()
        if self._caches.prefixes.needs_snapshots:
            wholes = whole_items(spans, media)
            points = self._snapshot_points.points_in(chat, token_ids, wholes, submit.cache_salt)
            snapshot_points = points[bisect_left(points, num_atomic) :]
        return PreparedPrompt(
            token_ids=token_ids,
            spans=spans,
            positions=positions,
            rope_delta=rope_delta,
            snapshot_points=snapshot_points,
            chunk_ends=snapshot_points if self._spec.has_states else (),
            atomic_prefill_tokens=num_atomic,
            token_types=token_types if num_atomic else None,
            **self._apart(submit),
        )

    def _apart(self, submit: Submit) -> dict[str, Any]:
        """The fields of a prompt that set it apart from others of the same tokens.

        Raises InvalidRequest for an adapter that the model does not have.
        """
        if not submit.adapter:
            return {"cache_salt": submit.cache_salt}
        adapters = self._spec.adapters
        if submit.adapter not in adapters:
            raise InvalidRequest(f"The model has no adapter `{submit.adapter}`.", "model")
        return {
            "cache_salt": submit.cache_salt,
            "adapter": 1 + list(adapters).index(submit.adapter),
            "adapter_digest": adapters[submit.adapter],
        }

    def _look_up(
        self, prompt: PreparedPrompt, media: list[MediaItem], *, use_disk: bool
    ) -> Prepared:
        """Reference the cache entries of `prompt`, and process the media that no cache has.

        Nothing is read from disk here: memory is reserved for that first.
        """
        references = self._references(prompt)
        units = [(item, unit) for item in media for unit in range(len(item.mm_hashes))]
        inputs: dict[int, MediaInputs] = {}
        try:
            disk_read = references.look_up(on_disk=use_disk)
            for index in list(references.missing_spans()):
                if disk_read is None or not disk_read.covers(index):
                    item, unit = units[index]
                    inputs[index] = item.inputs(unit)
        except BaseException:
            references.release()
            raise
        return Prepared(prompt, references, inputs, disk_read)


def atomic_prefill_tokens(policy: ChunkPolicy, token_types: NDArray[np.int32]) -> int:
    """The number of first tokens that must be prefilled in one chunk; 0 in most families.

    In some families the tokens of an image, or of a prompt, attend to each other, and mlx-vlm masks
    them correctly only in one call from the first token on. token_types: see `PreparedPrompt`.
    """
    match policy:
        case ChunkPolicy.ANYWHERE:
            return 0
        case ChunkPolicy.AFTER_MEDIA:
            media = np.flatnonzero(token_types)
            return int(media[-1]) + 1 if len(media) else 0
        case ChunkPolicy.NOWHERE:
            return len(token_types)
