"""One request's life inside the engine. Knows states, prompts and choices; knows no queue."""

from __future__ import annotations

from dataclasses import replace

from vlm_server.engine.choice import Choice
from vlm_server.engine.detokenizer import Decoder
from vlm_server.engine.states import State, check_transition
from vlm_server.engine.turns import Waiting
from vlm_server.ports import EncodedImage, NewRequest, PreparedPrompt, RowId
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
        self.encoded: list[EncodedImage] = []
        self.num_prefilled = 0
        self.is_known_to_runner = False
        self.choices = tuple(Choice(sampling, decoder) for _ in range(sampling.n))
        self.rows = [RowId(submit.request_id, number) for number in range(sampling.n)]
        """One for each choice that has not ended."""

    def move_to(self, state: State) -> None:
        """Raises IllegalTransition for a move that no request may make."""
        check_transition(self.state, state)
        self.state = state

    def take_prompt(self, prompt: PreparedPrompt, max_tokens: int) -> None:
        """The prompt is ready; the encoded pictures of `submit` are not needed any more."""
        self.prompt, self.submit, self.max_tokens = prompt, None, max_tokens
        self.move_to(State.PREFILL)

    def hand_over(self) -> NewRequest:
        """All that the runner needs; the pixels are not needed here any more."""
        assert self.prompt is not None
        new = NewRequest(self.request_id, self.prompt, self.sampling, tuple(self.encoded))
        self.is_known_to_runner = True
        self.prompt, self.encoded = replace(self.prompt, images=()), []
        return new

    @property
    def needs_encoding(self) -> bool:
        """Whether a picture waits for the encoder."""
        return self.state is State.PREFILL and not self.can_prefill

    @property
    def can_prefill(self) -> bool:
        """Whether all pictures are encoded and some of the prompt is not prefilled."""
        if self.prompt is None or self.state is not State.PREFILL:
            return False
        return self.is_known_to_runner or len(self.encoded) == len(self.prompt.images)

    @property
    def work_left(self) -> Waiting:
        """What it wants of the device before it decodes: tokens to encode and to prefill.

        Begun from its first encoded picture on.
        """
        assert self.prompt is not None
        left = self.prompt.num_tokens - self.num_prefilled
        left += sum(span.end - span.start for span in self.prompt.images[len(self.encoded) :])
        return Waiting(self.request_id, left, bool(self.encoded) or self.is_known_to_runner)

    @property
    def tokens_left(self) -> Waiting:
        """What it wants of the prefill, which all its rows come from.

        Begun from its first chunk on, when it holds a KV cache.
        """
        assert self.prompt is not None
        left = self.prompt.num_tokens - self.num_prefilled
        is_begun = self.is_known_to_runner
        return Waiting(self.request_id, left, is_begun, num_rows=len(self.choices))

    def take_token(self, row: RowId, token_id: int, eos_token_ids: frozenset[int]) -> str:
        """The text that a token of `row` brings; the last choice to end finishes the request."""
        choice = self.choices[row.choice]
        text = choice.take_token(token_id, eos_token_ids, self.max_tokens)
        if choice.finish_reason is not None:
            self.rows.remove(row)
            if not self.rows:
                self.move_to(State.FINISHED_ANSWERED)
        return text

    @property
    def usage(self) -> Usage:
        prompt_tokens = self.prompt.num_tokens if self.prompt else 0
        completion_tokens = sum(choice.num_generated for choice in self.choices)
        return Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
