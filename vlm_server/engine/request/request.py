"""One request's life inside the engine. Knows states, prompts and choices; knows no queue."""

from __future__ import annotations

from dataclasses import replace

from vlm_server.cache.caches import EncodedImage, Prefix
from vlm_server.cache.lru import Lease
from vlm_server.engine.request.choice import Choice
from vlm_server.engine.request.detokenizer import Decoder
from vlm_server.engine.request.states import State, check_transition
from vlm_server.engine.scheduling.fair_queue import Waiting
from vlm_server.ports import NewRequest, PreparedPrompt, SeqId
from vlm_server.protocol import SamplingParams, Submit, Usage


class Request:
    """State and progress of one request, and its choices; `Scheduler` alone changes it."""

    def __init__(self, submit: Submit, sampling: SamplingParams, decoder: Decoder) -> None:
        self.request_id = submit.request_id
        self.submit: Submit | None = submit
        # Of `submit`, which is dropped once the prompt is ready.
        self.has_media = submit.has_media
        self.has_video = bool(submit.videos)
        self.sampling = sampling
        self.state = State.WAITING
        self.prompt: PreparedPrompt | None = None
        self.max_tokens = sampling.max_tokens or 0
        self.features: list[Lease[EncodedImage]] = []
        """Of the prompt's first pictures, as far as they are encoded."""
        self.has_media_left = False
        """Whether there are pictures in what is not prefilled."""
        self.num_prefilled = 0
        self.num_cached_tokens = 0
        self.is_admitted = False
        """Whether it may take device memory; see `Governor.admit`."""
        self.is_waiting_for_memory = False
        self.has_run_out = False
        """Whether an encode failed for want of memory."""
        self.transient_bytes = 0
        """What it was let in with for its worst moment, beside what it holds until it ends."""
        self.is_known_to_runner = False
        self.choices = tuple(Choice(sampling, decoder) for _ in range(sampling.n))
        self.rows = [SeqId(submit.request_id, number) for number in range(sampling.n)]
        """One for each choice that has not ended."""

    def move_to(self, state: State) -> None:
        """Raises IllegalTransition for a move that no request may make."""
        check_transition(self.state, state)
        self.state = state

    def take_prompt(self, prompt: PreparedPrompt, max_tokens: int) -> None:
        """The prompt is ready; the encoded pictures of `submit` are not needed any more."""
        self.prompt, self.submit, self.max_tokens = prompt, None, max_tokens
        self.has_media_left = bool(prompt.images)
        self.num_prefilled = self.num_cached_tokens = prompt.num_cached_tokens
        self.move_to(State.PREFILL)
        self._take_known_features()

    def take_prefix(self, prefix: Prefix) -> None:
        """More of the prompt was found, before its prefill began: pictures in it need nothing."""
        assert self.prompt is not None
        known = [span for span in self.prompt.images if span.end <= prefix.length]
        images = self.prompt.images[len(known) :]
        for done in self.features[: len(known)]:
            done.release()
        for span in known[len(self.features) :]:
            if span.features:
                span.features.release()
        self.features = self.features[len(known) :]
        self.prompt = replace(self.prompt, images=images, prefix=prefix)
        self.has_media_left = bool(images)
        self.num_prefilled = self.num_cached_tokens = prefix.length
        self._take_known_features()

    def take_features(self, features: Lease[EncodedImage]) -> None:
        """The next picture is encoded."""
        self.features.append(features)
        self._take_known_features()

    def hand_over(self) -> NewRequest:
        """All that the runner needs; what it is made of may be released after its first step."""
        assert self.prompt is not None
        images = tuple(lease.value for lease in self.features)
        self.is_known_to_runner = True
        return NewRequest(self.request_id, self.prompt, self.sampling, images)

    def release(self) -> None:
        """Let go of what the runner does not need any more, or never will: pixels, features, KV."""
        for lease in self.features:
            lease.release()
        num_taken, self.features = len(self.features), []
        if self.prompt:
            # Leases of the first images are in `features`, and released.
            replace(self.prompt, images=self.prompt.images[num_taken:]).release()
            self.prompt = replace(
                self.prompt, images=(), positions=None, token_types=None, prefix=None
            )

    def _take_known_features(self) -> None:
        assert self.prompt is not None
        for span in self.prompt.images[len(self.features) :]:
            if span.features is None:
                return
            self.features.append(span.features)

    @property
    def needs_encoding(self) -> bool:
        """Whether a picture waits for the encoder."""
        return self.is_admitted and self.state is State.PREFILL and not self.can_prefill

    @property
    def can_prefill(self) -> bool:
        """Whether all pictures are encoded and some of the prompt is not prefilled."""
        if self.prompt is None or self.state is not State.PREFILL or not self.is_admitted:
            return False
        return self.is_known_to_runner or len(self.features) == len(self.prompt.images)

    @property
    def work_left(self) -> Waiting:
        """What it wants of the device before it decodes: tokens to encode and to prefill.

        Begun from its first encoded picture on.
        """
        assert self.prompt is not None
        left = self.prompt.num_tokens - self.num_prefilled
        unknown = [s for s in self.prompt.images[len(self.features) :] if s.features is None]
        left += sum(span.end - span.start for span in unknown)
        return Waiting(self.request_id, left, bool(self.features) or self.is_known_to_runner)

    @property
    def tokens_left(self) -> Waiting:
        """What it wants of the prefill, which all its rows come from.

        Begun from its first chunk on, when it holds a KV cache.
        """
        assert self.prompt is not None
        left = self.prompt.num_tokens - self.num_prefilled
        is_begun = self.is_known_to_runner
        return Waiting(self.request_id, left, is_begun, num_rows=len(self.choices))

    def take_token(self, row: SeqId, token_id: int, eos_token_ids: frozenset[int]) -> str:
        """The text that a token of `row` brings; the last choice to end finishes the request."""
        choice = self.choices[row.choice]
        text = choice.take_token(token_id, eos_token_ids, self.max_tokens)
        if choice.finish_reason is not None:
            self.rows.remove(row)
            if not self.rows:
                self.move_to(State.FINISHED_ANSWERED)
        return text

    @property
    def num_held_tokens(self) -> tuple[int, int]:
        """How many rows the runner holds of it, and the tokens of the longest."""
        if not self.is_known_to_runner:
            return 0, 0
        assert self.prompt is not None
        if self.state is State.PREFILL:  # its buffers are made with its first chunk
            return 1, self.prompt.num_tokens
        longest = max((choice.num_generated for choice in self.choices), default=0)
        return len(self.rows), self.num_prefilled + longest

    @property
    def usage(self) -> Usage:
        prompt_tokens = self.prompt.num_tokens if self.prompt else 0
        completion_tokens = sum(choice.num_generated for choice in self.choices)
        return Usage(prompt_tokens, completion_tokens, self.num_cached_tokens)
