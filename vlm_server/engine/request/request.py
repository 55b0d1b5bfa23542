"""One request's life inside the engine: its state, its progress and what it holds.

Only `Scheduler` and its `Planner` change it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from vlm_server.cache.caches import EncodedImage
from vlm_server.cache.disk.load import DiskLoad, Loaded
from vlm_server.cache.holds import CacheHolds
from vlm_server.cache.lru import Lease
from vlm_server.engine.output.answer_parser import build_parser
from vlm_server.engine.output.detokenizer import Decoder
from vlm_server.engine.output.formats import NO_FORMATS, Formats
from vlm_server.engine.output.pieces import Piece
from vlm_server.engine.request.choice import Choice
from vlm_server.engine.request.states import State, check_transition
from vlm_server.engine.request.stopwatch import Stopwatch
from vlm_server.interfaces import (
    EncodeWork,
    MediaInputs,
    NewRequest,
    Prepared,
    PreparedPrompt,
    SeqId,
)
from vlm_server.protocol import RequestProgress, SamplingParams, Submit, Timeline, Usage
from vlm_server.protocol.deadlines import RequestDeadlines


class Request:
    """From `WAITING` to its end, with its choices."""

    def __init__(
        self,
        submit: Submit,
        sampling: SamplingParams,
        decoder: Decoder,
        clock: Callable[[], float],
    ) -> None:
        """`sampling`: that of `submit`, with defaults. Its deadlines begin now, by `clock`."""
        self._stopwatch = Stopwatch(clock)
        self.request_id = submit.request_id
        self.client = submit.client
        self.deadlines = RequestDeadlines(submit.deadlines, self._stopwatch.began_at)
        self.sampling = sampling
        self.count_only = submit.count_only
        self.state = State.WAITING
        self.submit: Submit | None = submit
        """Dropped once its prompt is read: until then it may have to be prepared again."""
        self.may_use_disk = True
        self.load: DiskLoad | None = None
        """What is to be read from disk, until it is."""
        self.has_media = submit.has_media
        self.has_video = bool(submit.videos)
        self.num_pixels = 0
        """Of its images, to decode; those of a video are not counted."""
        self.has_schema = submit.has_schema
        self.num_schema_chars = len(submit.sampling.json_schema or "")
        """Of all schemas that its answer may have to follow."""
        if submit.tools is not None:
            self.num_schema_chars += len(submit.tools.definitions)
        self.max_tokens = sampling.max_tokens or 0
        """Of each choice; 0 while nobody knows how long the prompt is."""
        self.num_prefilled = 0
        self.num_cached_tokens = 0
        self.num_encoded = 0
        """Media that the device has encoded for it."""
        self.transient_bytes = 0
        """Device memory reserved for its worst moment, beside what it holds until it ends."""
        self.start_tag = 0
        """Its place among the requests that wait; see `scheduling.client_queue`."""
        self.has_left_queue = False
        """Whether the device has begun with it, if only with its first encode."""
        self.is_known_to_runner = False
        self.num_retries = Counter[str]()
        """How often its encodes and its prefill began again, by the error's code."""
        self.choices = tuple(Choice(sampling, decoder) for _ in range(sampling.n))
        self.seqs = [SeqId(submit.request_id, number) for number in range(sampling.n)]
        """One for each choice that has not ended."""
        self._prompt: PreparedPrompt | None = None
        self._holds: CacheHolds | None = None
        self._inputs: dict[int, MediaInputs] = {}
        """Of the spans that were in no cache, until they are encoded."""

    # ---- what it is ------------------------------------------------------------------

    @property
    def prompt(self) -> PreparedPrompt:
        """To be asked for after `PREPARING`."""
        assert self._prompt is not None
        return self._prompt

    @property
    def has_uncached_media(self) -> bool:
        """Whether there are media after the cached prefix."""
        spans = self._prompt.spans if self._prompt else ()
        return bool(spans) and spans[-1].end > self.num_cached_tokens

    @property
    def num_prefill_tokens_left(self) -> int:
        return self.prompt.num_tokens - self.num_prefilled

    @property
    def num_media_tokens(self) -> int:
        """Tokens of the media after the cached prefix, whether they are encoded or not."""
        return 0 if self._holds is None else self._holds.num_media_tokens

    @property
    def spans_to_encode(self) -> list[int]:
        """Lengths, in tokens, of the media whose features nobody has."""
        if self._holds is None:
            return []
        spans = self.prompt.spans
        return [spans[index].end - spans[index].start for index in self._holds.missing()]

    @property
    def is_begun(self) -> bool:
        """Whether the device has worked on it: its first media are encoded, or its first chunk."""
        has_features = self._holds is not None and self._holds.has_first_features
        return has_features or self.is_known_to_runner

    @property
    def num_kv_tokens(self) -> int:
        """Tokens of its longest sequence in the runner; its buffers come with its first chunk."""
        if not self.is_known_to_runner:
            return 0
        if self.state is State.PREFILL:
            return self.prompt.num_tokens
        return self.num_prefilled + max(
            (choice.num_generated for choice in self.choices), default=0
        )

    @property
    def progress(self) -> RequestProgress:
        done, total = 0, 0
        if self.state is State.PREFILL:
            done, total = self.num_prefilled, self.prompt.num_tokens
        elif self.state is State.DECODE:
            done = sum(choice.num_generated for choice in self.choices)
            total = self.max_tokens * len(self.choices)
        return RequestProgress(self.request_id, self.state.value, done, total)

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
        return self._stopwatch.read()

    @property
    def load_bytes(self) -> int:
        """Memory that what is read from disk will take."""
        return 0 if self.load is None else self.load.size_bytes

    # ---- what happens to it ----------------------------------------------------------

    def move_to(self, state: State) -> None:
        """Raises IllegalTransition for a move that no request may make."""
        check_transition(self.state, state)
        self.state = state
        self._stopwatch.enter(state, has_left_queue=self.has_left_queue)

    def set_prepared(
        self, prepared: Prepared, max_tokens: int, formats: Formats = NO_FORMATS
    ) -> None:
        """The prompt is ready.

        `formats`: how the model writes what is not content.
        """
        self._prompt, self._holds = prepared.prompt, prepared.holds
        for choice in self.choices:
            choice.read_with(
                build_parser(
                    formats,
                    prepared.prompt.answer_format,
                    is_json=self.sampling.json_schema is not None,
                )
            )
        self._inputs = dict(prepared.inputs)
        self.load, self.max_tokens = prepared.load, max_tokens
        self.num_prefilled = self.num_cached_tokens = prepared.holds.num_cached_tokens
        self.move_to(State.WAITING_FOR_MEMORY)

    def set_counted(self, prepared: Prepared) -> None:
        """The prompt was all that was wanted."""
        self._prompt, self._holds = prepared.prompt, prepared.holds
        self.num_cached_tokens = prepared.holds.num_cached_tokens
        self.move_to(State.FINISHED_ANSWERED)

    def admit(self, transient_bytes: int) -> None:
        """It may take device memory from now on."""
        self.transient_bytes = transient_bytes
        if self.load is not None:
            self.move_to(State.LOADING)
        else:
            self.move_to(State.ENCODING if self.spans_to_encode else State.PREFILL)

    def take_loaded(self, loaded: Loaded) -> None:
        """All was read from disk that can be; what is missing without pixels is prepared again."""
        assert self._holds is not None
        self._holds.take(loaded)
        if any(index not in self._inputs for index in self._holds.missing()):
            self.prepare_again()
            return
        self.load = None
        self.num_prefilled = self.num_cached_tokens = self._holds.num_cached_tokens
        self.move_to(State.ENCODING if self.spans_to_encode else State.PREFILL)

    def prepare_again(self) -> None:
        """Go back to WAITING, to be prepared without the disk."""
        self.may_use_disk = False
        self.begin_again()

    def begin_again(self) -> None:
        """Go back to WAITING; the runner has dropped what it had of it."""
        self.release_holds()
        self.load, self.transient_bytes, self.is_known_to_runner = None, 0, False
        self.num_prefilled = self.num_cached_tokens = 0
        self.move_to(State.WAITING)

    def begin_answer(self) -> None:
        """Its prompt is read."""
        self.submit = None
        self.move_to(State.DECODE)

    def leave_queue(self) -> None:
        """Note that the device begins with it: it waits no more."""
        self.has_left_queue = True
        self._stopwatch.enter(self.state, has_left_queue=True)
        self.deadlines.begin()

    def rematch_prefix(self) -> None:
        """Look again how much of the prompt is cached by now, before its prefill begins."""
        if self._holds is not None and self._holds.rematch_prefix():
            self.num_prefilled = self.num_cached_tokens = self._holds.num_cached_tokens
            self._note_encoded()

    def cut_prefix(self, length: int) -> None:
        """Begin its prefill after no more than so many tokens; see `CacheHolds.cut_prefix`."""
        assert self._holds is not None
        self._holds.cut_prefix(length)
        self.num_prefilled = self.num_cached_tokens = self._holds.num_cached_tokens

    def next_encode(self) -> EncodeWork | None:
        """The next of its media to encode; None if all are encoded, or found in a cache by now."""
        assert self._holds is not None
        for index in self._holds.missing():
            if not self._holds.lease_features(index):
                return EncodeWork(self.request_id, index, self.prompt, self._inputs[index])
        self._note_encoded()
        return None

    def media_to_encode(self) -> Iterator[EncodeWork]:
        """Its media that are to be encoded, in order, up to one that a cache has by now."""
        assert self._holds is not None
        for index in self._holds.missing():
            if self._holds.is_in_memory(index):
                return
            yield EncodeWork(self.request_id, index, self.prompt, self._inputs[index])

    def add_features(self, index: int, lease: Lease[EncodedImage]) -> None:
        """The media of span `index` are encoded."""
        assert self._holds is not None
        self.num_encoded += 1
        self._holds.add_features(index, lease)
        self._inputs.pop(index, None)
        self._note_encoded()

    def start_in_runner(self) -> NewRequest:
        """All that the runner needs; `release_holds` once it has copied that."""
        assert self._holds is not None
        self.is_known_to_runner = True
        return NewRequest(
            self.request_id, self.prompt, self.sampling, self._holds.prefix, self._holds.features
        )

    def append_token(
        self, seq: SeqId, token_id: int, eos_token_ids: frozenset[int]
    ) -> Sequence[Piece]:
        """What a token of `seq` brings; the last choice to end finishes the request."""
        choice = self.choices[seq.choice]
        pieces = choice.append_token(token_id, eos_token_ids, self.max_tokens)
        if choice.finish_reason is not None:
            self.seqs.remove(seq)
            if not self.seqs:
                self.move_to(State.FINISHED_ANSWERED)
        return pieces

    def release_holds(self) -> None:
        """Release what only a prefill needs: pixels, features, the cached prefix."""
        holds, self._holds = self._holds, None
        self._inputs = {}
        if holds is not None:
            holds.release()

    def _note_encoded(self) -> None:
        if self.state is State.ENCODING and not self.spans_to_encode:
            self.move_to(State.PREFILL)
