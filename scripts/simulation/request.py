"""One turn of a conversation in a worker: has what `DeviceOrder` reads of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import simpy

from vlm_server.engine.request.states import State


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture in a prompt: its tokens, and where they end there."""

    name: str
    tokens: int
    end: int


@dataclass(frozen=True, slots=True)
class Question:
    """What a client sends: its conversation so far, and how many tokens it wants."""

    conversation: str
    turn: int
    prompt_tokens: int
    pictures: tuple[Picture, ...]
    answer_tokens: int


class SimulatedRequest:
    """A question, and how far a worker is with it.

    `first` happens with its first token and `last` with the last; both with False if the worker is
    lost.
    """

    def __init__(self, env: simpy.Environment, request_id: str, question: Question) -> None:
        self.request_id = request_id
        self.question = question
        self.state = State.WAITING
        self.first = env.event()
        self.last = env.event()
        self.num_cached_tokens = 0
        self.num_prefilled = 0
        self.tokens_left = question.answer_tokens
        self.missing: list[Picture] = []
        """Pictures that nobody has encoded."""
        self.is_known_to_runner = False
        self._num_encoded = 0

    num_seqs = 1

    @property
    def seqs(self) -> Sequence[str]:
        return (self.request_id,)

    @property
    def choices(self) -> Sequence[str]:
        return (self.request_id,)

    @property
    def has_uncached_media(self) -> bool:
        pictures = self.question.pictures
        return bool(pictures) and pictures[-1].end > self.num_cached_tokens

    @property
    def num_prefill_tokens_left(self) -> int:
        return self.question.prompt_tokens - self.num_prefilled

    @property
    def encode_lengths(self) -> list[int]:
        return [picture.tokens for picture in self.missing]

    @property
    def is_begun(self) -> bool:
        return self._num_encoded > 0 or self.is_known_to_runner

    @property
    def context_tokens(self) -> int:
        """Before the token that it decodes next."""
        question = self.question
        return question.prompt_tokens + question.answer_tokens - self.tokens_left

    def take_features(self, picture: Picture) -> None:
        """It was encoded, for this request or another."""
        if picture in self.missing:
            self.missing.remove(picture)
            self._num_encoded += 1
        if not self.missing and self.state is State.ENCODING:
            self.state = State.PREFILL
