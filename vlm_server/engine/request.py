"""One request's life inside the engine. Knows states, tokens and text; knows no queue."""

from __future__ import annotations

from vlm_server.engine.detokenizer import Decoder, Detokenizer
from vlm_server.engine.states import State, check_transition
from vlm_server.engine.stops import StopChecker
from vlm_server.engine.turns import Waiting
from vlm_server.ports import EncodedImage, PreparedPrompt
from vlm_server.protocol import FinishReason, SamplingParams, Submit, Usage

_FINISHED: dict[FinishReason, State] = {
    "stop": State.FINISHED_STOPPED,
    "length": State.FINISHED_LENGTH,
    "abort": State.FINISHED_ABORTED,
}


class Request:
    """State, progress and output of one request; `Scheduler` alone changes it."""

    def __init__(self, submit: Submit, sampling: SamplingParams, decoder: Decoder) -> None:
        self.request_id = submit.request_id
        self.submit: Submit | None = submit
        self.has_media = submit.has_media
        self.sampling = sampling
        self.state = State.WAITING
        self.prompt: PreparedPrompt | None = None
        self.max_tokens = sampling.max_tokens or 0
        self.encoded: list[EncodedImage] = []
        self.num_prefilled = 0
        self.num_generated = 0
        self.is_known_to_runner = False
        self._detokenizer = Detokenizer(decoder)
        self._stops = StopChecker(sampling.stop)

    def move_to(self, state: State) -> None:
        """Raises IllegalTransition for a move that no request may make."""
        check_transition(self.state, state)
        self.state = state

    def take_prompt(self, prompt: PreparedPrompt, max_tokens: int) -> None:
        """The prompt is ready; the encoded pictures of `submit` are not needed any more."""
        self.prompt, self.submit, self.max_tokens = prompt, None, max_tokens
        self.move_to(State.PREFILL)

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
    def pictures_left(self) -> Waiting:
        """What it wants of the encoder."""
        assert self.prompt is not None
        left = len(self.prompt.images) - len(self.encoded)
        return Waiting(self.request_id, left, is_begun=bool(self.encoded))

    @property
    def tokens_left(self) -> Waiting:
        """What it wants of the prefill."""
        assert self.prompt is not None
        left = self.prompt.num_tokens - self.num_prefilled
        return Waiting(self.request_id, left, is_begun=self.is_known_to_runner)

    def take_token(self, token_id: int, eos_token_ids: frozenset[int]) -> str:
        """The text that a sampled token brings; may finish the request."""
        self.num_generated += 1
        if token_id in eos_token_ids and not self.sampling.ignore_eos:
            self.finish("stop")
            return self._last_text()[0]
        text, is_stopped = self._stops.push(self._detokenizer.push(token_id))
        is_last = self.num_generated >= self.max_tokens
        if is_last and not is_stopped:
            rest, is_stopped = self._last_text()
            text += rest
        if is_stopped or is_last:
            self.finish("stop" if is_stopped else "length")
        return text

    def finish(self, reason: FinishReason) -> None:
        self.move_to(_FINISHED[reason])

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended; None while it lives and when it failed."""
        return next((name for name, state in _FINISHED.items() if state is self.state), None)

    @property
    def usage(self) -> Usage:
        prompt_tokens = self.prompt.num_tokens if self.prompt else 0
        return Usage(prompt_tokens=prompt_tokens, completion_tokens=self.num_generated)

    def _last_text(self) -> tuple[str, bool]:
        """(what was held back, whether a stop string was in it)."""
        text, is_stopped = self._stops.push(self._detokenizer.flush())
        return (text, True) if is_stopped else (text + self._stops.flush(), False)
