"""One request's life inside the engine: its state, its progress and its cache references.

Only `Scheduler` and its `Planner` change it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from tokenizers import Tokenizer

from vlm_server.cache.caches import EncodedImage
from vlm_server.cache.disk.tier import DiskRead, DiskReadResult
from vlm_server.cache.lru import Lease
from vlm_server.cache.references import CacheReferences
from vlm_server.deadlines import RequestDeadlines
from vlm_server.engine.output.answer_parser import build_parser
from vlm_server.engine.output.formats import NO_FORMATS, Formats
from vlm_server.engine.output.pieces import Piece
from vlm_server.engine.request.choice import Choice
from vlm_server.engine.request.option_progress import OptionProgress
from vlm_server.engine.request.states import State, Stopwatch, check_transition
from vlm_server.interfaces import (
    DiskReadWork,
    EncodeWork,
    MediaInputs,
    NewRequest,
    Prepared,
    PreparedPrompt,
    PrepareWork,
    SeqId,
)
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.protocol import RequestProgress, SamplingParams, Submit, Timeline, Usage


class Request:
    """A request from `WAITING` to its end, with its choices."""

    def __init__(
        self,
        submit: Submit,
        sampling: SamplingParams,
        decoder: Tokenizer,
        clock: Callable[[], float],
    ) -> None:
        """`sampling`: that of `submit`, with defaults. The deadlines begin now, by `clock`."""
        self._stopwatch = Stopwatch(clock)
        self.request_id = submit.request_id
        self.client = submit.client
        self.deadlines = RequestDeadlines(submit.deadlines, self._stopwatch.began_at)
        self.sampling = sampling
        self.count_only = submit.count_only
        self.pooling = submit.pooling
        """The vectors wanted in place of an answer, if any."""
        self.state = State.WAITING
        self.submit: Submit | None = submit
        """The client's request, which may have to be prepared again until its prefill ends."""
        self.may_use_disk = True
        self.disk_read: DiskRead | None = None
        """The part of the prompt to read from disk; None once it is read."""
        self.cancellation: Cancellation | None = None
        """Cancels the preparation or disk read under way."""
        self.has_media = submit.has_media
        self.has_video = bool(submit.videos)
        self.num_pixels = 0
        """The number of pixels to decode of its images, without those of videos."""
        self.has_schema = submit.has_schema
        self.num_schema_chars = len(submit.sampling.json_schema or "")
        """The length of all schemas that its answer may have to follow."""
        if submit.tools is not None:
            self.num_schema_chars += len(submit.tools.definitions)
        self.max_tokens = sampling.max_tokens or 0
        """The maximum length of each choice; 0 while the length of the prompt is unknown."""
        self.num_prefilled = 0
        self.scoring = OptionProgress(())
        """The progress of its prompt's options."""
        self.logit_bytes = 0
        """Device memory for the logits of one token of its options."""
        self.num_cached_tokens = 0
        self.num_encoded = 0
        """The number of media that the device has encoded for it."""
        self.transient_bytes = 0
        """Device memory reserved for its peak, in addition to its KV."""
        self.virtual_start = 0
        """Its position in the queue; see `scheduler.live_requests`."""
        self.has_left_queue = False
        """Whether the device has begun with its disk read, an encode or its prefill."""
        self.is_known_to_runner = False
        self.num_retries = Counter[str]()
        """Retries of its encodes and its prefill, by the error's code."""
        num_choices = 0 if submit.pooling is not None else sampling.n
        self.choices = tuple(Choice(sampling, decoder) for _ in range(num_choices))
        self.seqs = [SeqId(submit.request_id, number) for number in range(num_choices)]
        """The sequences of the choices that have not ended."""
        self._prompt: PreparedPrompt | None = None
        self._references: CacheReferences | None = None
        """References to its cache entries, until the runner has copied these."""
        self._inputs: dict[int, MediaInputs] = {}
        """The encoder's inputs of uncached spans, until they are encoded."""

    # ---- readings --------------------------------------------------------------------

    @property
    def prompt(self) -> PreparedPrompt:
        """The prompt; available from the end of `PREPARING` on."""
        assert self._prompt is not None
        return self._prompt

    @property
    def has_uncached_media(self) -> bool:
        """Whether there are media after the cached prefix, and their prompt is not prefilled."""
        spans = self._prompt.spans if self._prompt else ()
        return bool(spans) and spans[-1].end > self.num_cached_tokens and not self.is_scoring

    @property
    def is_scoring(self) -> bool:
        """Whether its prompt is prefilled, and options are left to score."""
        return bool(self.scoring.lengths) and self.num_prefilled == self.prompt.num_tokens

    @property
    def num_prefill_tokens_left(self) -> int:
        """Tokens left of its prompt, and of its options."""
        return self.prompt.num_tokens - self.num_prefilled + self.scoring.num_tokens_left

    @property
    def num_media_tokens(self) -> int:
        """Tokens of the media after the cached prefix, encoded or not."""
        return 0 if self._references is None else self._references.num_media_tokens

    @property
    def encode_lengths(self) -> list[int]:
        """Lengths, in tokens, of the media to encode."""
        if self._references is None:
            return []
        spans = self.prompt.spans
        return [spans[index].end - spans[index].start for index in self._references.missing_spans()]

    @property
    def is_begun(self) -> bool:
        """Whether its first media are encoded, or its prefill has begun."""
        has_features = self._references is not None and self._references.has_first_features
        return has_features or self.is_known_to_runner

    @property
    def num_kv_tokens(self) -> int:
        """Tokens in the runner's buffers of its longest sequence; 0 before its first chunk."""
        if not self.is_known_to_runner:
            return 0
        if self.state is State.PREFILL:
            return self.prompt.num_tokens
        return self.num_prefilled + max(
            (choice.num_generated for choice in self.choices), default=0
        )

    @property
    def progress(self) -> RequestProgress:
        num_done, total = 0, 0
        if self.state is State.PREFILL:
            num_done, total = self.num_prefilled, self.prompt.num_tokens
        elif self.state is State.ENCODING:
            total = self.num_media_tokens
            num_done = total - sum(self.encode_lengths)
        elif self.state is State.DECODE:
            num_done = sum(choice.num_generated for choice in self.choices)
            total = self.max_tokens * len(self.choices)
        return RequestProgress(self.request_id, self.state.value, num_done, total)

    @property
    def usage(self) -> Usage:
        prompt_tokens = self._prompt.num_tokens if self._prompt else 0
        completion_tokens = sum(choice.num_generated for choice in self.choices)
        return Usage(
            prompt_tokens,
            completion_tokens,
            self.num_cached_tokens,
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self.choices),
            accepted_prediction_tokens=sum(choice.num_accepted for choice in self.choices),
            rejected_prediction_tokens=sum(choice.num_rejected for choice in self.choices),
        )

    @property
    def timeline(self) -> Timeline:
        return self._stopwatch.timeline()

    @property
    def disk_read_bytes(self) -> int:
        """Device memory for the entries to read from disk."""
        return 0 if self.disk_read is None else self.disk_read.size_bytes

    def next_encode(self) -> EncodeWork:
        """The encode of the next of its media, while it is ENCODING."""
        assert self._references is not None
        return self._encode_of(next(self._references.missing_spans()))

    def media_to_encode(self) -> Iterator[EncodeWork]:
        """Encodes of its media, in order, up to one that is in a cache by now."""
        assert self._references is not None
        for index in self._references.missing_spans():
            if self._references.is_in_memory(index):
                return
            yield self._encode_of(index)

    def _encode_of(self, index: int) -> EncodeWork:
        return EncodeWork(self.request_id, index, self.prompt, self._inputs[index])

    # ---- changes ---------------------------------------------------------------------

    def move_to(self, state: State) -> None:
        """Change the state. Raises IllegalTransition for a move that no request may make."""
        check_transition(self.state, state)
        self.state = state
        self._stopwatch.enter(state, has_left_queue=self.has_left_queue)

    def start_prepare(self) -> PrepareWork:
        """Start its preparation; returns the work for a preparer thread."""
        assert self.submit is not None
        self.move_to(State.PREPARING)
        self.cancellation = Cancellation()
        return PrepareWork(self.submit, self.cancellation, self.may_use_disk)

    def on_prepared(
        self, prepared: Prepared, max_tokens: int, formats: Formats = NO_FORMATS
    ) -> None:
        """Take over the prompt. `formats`: those of the model's tool calls and reasoning."""
        self._prompt, self._references = prepared.prompt, prepared.references
        self.scoring = OptionProgress(prepared.prompt.options)
        is_json = self.sampling.json_schema is not None
        for choice in self.choices:
            choice.set_parser(build_parser(formats, prepared.prompt.answer_format, is_json=is_json))
        self._inputs = dict(prepared.inputs)
        self.disk_read, self.max_tokens = prepared.disk_read, max_tokens
        self._start_after_prefix(prepared.references)
        self.move_to(State.WAITING_FOR_MEMORY)

    def finish_count(self, prepared: Prepared) -> None:
        """Take over the prompt of a request that only wants its tokens, and end it."""
        self._prompt, self._references = prepared.prompt, prepared.references
        self.num_cached_tokens = prepared.references.num_cached_tokens
        self.move_to(State.FINISHED_ANSWERED)

    def finish_cached(self, prepared: Prepared) -> None:
        """Take over the prompt of a request whose vectors are cached, and end it."""
        self.finish_count(prepared)
        self.num_cached_tokens = prepared.prompt.num_tokens

    def finish_pooled(self) -> None:
        """End a request whose vectors, score or decision were made."""
        self.move_to(State.FINISHED_ANSWERED)

    def admit(self, transient_bytes: int) -> None:
        """Allow it device memory; `transient_bytes` are reserved for its peak."""
        self.transient_bytes = transient_bytes
        if self.disk_read is not None:
            self.move_to(State.READING_DISK)
        else:
            self._enter_encoding_or_prefill()

    def start_disk_read(self) -> DiskReadWork:
        """Start its disk read; returns the work for the disk reader."""
        assert self.disk_read is not None
        self.leave_queue()
        self.cancellation = Cancellation()
        return DiskReadWork(self.request_id, self.disk_read, self.cancellation)

    def on_disk_read(self, result: DiskReadResult) -> None:
        """Take over the entries read; prepare it again if media lack features and pixels."""
        assert self._references is not None
        self._references.take_disk_read(result)
        if any(index not in self._inputs for index in self._references.missing_spans()):
            self.restart(use_disk=False)
            return
        self.disk_read = None
        self._start_after_prefix(self._references)
        self._enter_encoding_or_prefill()

    def restart(self, *, use_disk: bool = True) -> None:
        """Go back to WAITING, after the runner has dropped it. Without `use_disk`, never use it."""
        self.release_references()
        self.may_use_disk &= use_disk
        self.disk_read, self.transient_bytes, self.is_known_to_runner = None, 0, False
        self.num_prefilled = self.num_cached_tokens = 0
        self.move_to(State.WAITING)

    def start_decode(self) -> None:
        """Record that its prompt is prefilled."""
        self.submit = None
        self.move_to(State.DECODE)

    def leave_queue(self) -> None:
        """Record that the device begins with it."""
        self.has_left_queue = True
        self._stopwatch.enter(self.state, has_left_queue=True)
        self.deadlines.begin()

    def rematch_prefix(self) -> None:
        """Look up the longest cached prefix again, before its prefill begins."""
        if self._references is not None and self._references.rematch_prefix():
            self._start_after_prefix(self._references)
            self._end_encoding_if_done()

    def rematch_caches(self) -> None:
        """Look up its prefix and the features of its next media again.

        Ends ENCODING if all media turn out to be cached.
        """
        self.rematch_prefix()
        if self.state is State.ENCODING:
            assert self._references is not None
            self._references.lease_first_features()
            self._end_encoding_if_done()

    def cut_prefix(self, length: int) -> None:
        """Use at most `length` tokens of the cached prefix; see `CacheReferences.cut_prefix`."""
        assert self._references is not None
        self._references.cut_prefix(length)
        self._start_after_prefix(self._references)

    def on_encoded(self, index: int, lease: Lease[EncodedImage]) -> None:
        """Take over the features of span `index`, which was encoded."""
        assert self._references is not None
        self.num_encoded += 1
        self._references.add_features(index, lease)
        self._inputs.pop(index, None)
        self._end_encoding_if_done()

    def start_in_runner(self) -> NewRequest:
        """Start its prefill; returns the work for the runner. Then `release_references`."""
        assert self._references is not None
        self.leave_queue()
        self.is_known_to_runner = True
        return NewRequest(
            self.request_id,
            self.prompt,
            self.sampling,
            self._references.prefix,
            self._references.features,
        )

    def append_token(
        self, seq: SeqId, token_id: int, eos_token_ids: frozenset[int]
    ) -> Sequence[Piece]:
        """Append a token to a choice; returns the pieces of the answer that it completes.

        The request ends with its last choice.
        """
        choice = self.choices[seq.choice]
        pieces = choice.append_token(token_id, eos_token_ids, self.max_tokens)
        if choice.finish_reason is not None:
            self.seqs.remove(seq)
            if not self.seqs:
                self.move_to(State.FINISHED_ANSWERED)
        return pieces

    def end(self, state: State) -> None:
        """Move it to the final `state`, cancel its work under way, and release its references."""
        if self.state is not state:
            self.move_to(state)
        if self.cancellation is not None:
            self.cancellation.cancel()
        self.release_references()

    def release_references(self) -> None:
        """Release the inputs of a prefill: pixels, features, the cached prefix."""
        references, self._references = self._references, None
        self._inputs = {}
        if references is not None:
            references.release()

    def _start_after_prefix(self, references: CacheReferences) -> None:
        self.num_prefilled = self.num_cached_tokens = references.num_cached_tokens

    def _enter_encoding_or_prefill(self) -> None:
        self.move_to(State.ENCODING if self.encode_lengths else State.PREFILL)

    def _end_encoding_if_done(self) -> None:
        if self.state is State.ENCODING and not self.encode_lengths:
            self.move_to(State.PREFILL)


_INPUT = "/"
"""Separates the id of a pooling request from the number of one of its inputs; ids have none."""


def input_id(group_id: str, index: int) -> str:
    """The id of the request for an input of a pooling request."""
    return f"{group_id}{_INPUT}{index}"


def input_index(request_id: str) -> int:
    """The number of an input in its pooling request."""
    return int(request_id.rpartition(_INPUT)[2])


def group_id_of(request_id: str) -> str:
    """The id that the front knows a request by: for an input, that of the whole request."""
    return request_id.partition(_INPUT)[0]
