"""A conversation with one model: the turns so far, and the next answer as it arrives."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from vlm_server.cli.ask import parameters
from vlm_server.cli.ask.media import Medium
from vlm_server.cli.ask.parameters import ParameterValue
from vlm_server.cli.ask.regions import Region, find_regions
from vlm_server.cli.client.answer import AnswerProgress, AnswerUsage
from vlm_server.cli.client.chat import routing_key, stream_chunks
from vlm_server.cli.client.daemon import Daemon

_MIN_PIECES = 8
"""Pieces of text from which a rate is measured."""


class AnswerView(Protocol):
    """Where an answer goes as it arrives."""

    def show_progress(self, progress: AnswerProgress) -> None:
        """What a silent answer waits for."""

    def show_reasoning(self, text: str) -> None:
        """A piece of the reasoning."""

    def write(self, text: str) -> None:
        """A piece of the answer."""


@dataclass(slots=True)
class ChatReply:
    """One answer; `image` is the conversation's last image, `regions` are places in it."""

    model: str
    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: AnswerUsage = field(default_factory=AnswerUsage)
    num_pieces: int = 0
    first_text_seconds: float | None = None
    total_seconds: float = 0.0
    image: Medium | None = None
    regions: Sequence[Region] = ()

    @property
    def tokens_per_second(self) -> float | None:
        """The rate after the first text; None for an answer in too few pieces to measure."""
        if self.first_text_seconds is None or self.num_pieces < _MIN_PIECES:
            return None
        tokens, seconds = self.usage.completion_tokens, self.total_seconds - self.first_text_seconds
        return (tokens - 1) / seconds if tokens and seconds > 0 else None


@dataclass(frozen=True, slots=True)
class Turn:
    """A question with its media, and the answer; `content` are the question's parts as sent."""

    media: Sequence[Medium]
    question: str
    answer: str
    content: list[dict[str, Any]]

    @property
    def messages(self) -> list[dict[str, Any]]:
        answer = {"role": "assistant", "content": self.answer}
        return [{"role": "user", "content": self.content}, answer]


class ChatSession:
    """The turns of a conversation; each question is sent with all earlier ones.

    `model` is an entry of `/v1/models`; it, `system` and `values` may change between questions.
    """

    def __init__(
        self,
        daemon: Daemon,
        model: dict[str, Any],
        values: dict[str, ParameterValue] | None = None,
        system: str | None = None,
    ) -> None:
        self._daemon = daemon
        self.model = model
        self.values = values or {}
        self.system = system
        self.turns: list[Turn] = []
        self.last: ChatReply | None = None
        self._key = ""

    def forget(self) -> None:
        """Start a new conversation."""
        self.turns, self._key, self.last = [], "", None

    async def ask(self, media: Sequence[Medium], question: str, view: AnswerView) -> ChatReply:
        """The answer to `question`, shown in `view`. Raises CommandFailed.

        An answer cut off by an interrupt is kept in the conversation; a failed question is not.
        """
        content = [*(medium.part for medium in media), {"type": "text", "text": question}]
        earlier = [medium for turn in self.turns for medium in turn.media]
        images = [medium for medium in [*earlier, *media] if medium.is_image]
        reply = ChatReply(str(self.model["id"]), image=images[-1] if images else None)
        try:
            await self._receive(reply, content, view)
        finally:
            if reply.text:
                self.turns.append(Turn(tuple(media), question, reply.text, content))
            if reply.text or reply.finish_reason:
                self.last = reply
        return reply

    async def _receive(
        self, reply: ChatReply, content: list[dict[str, Any]], view: AnswerView
    ) -> None:
        earlier = [message for turn in self.turns for message in turn.messages]
        messages = [*earlier, {"role": "user", "content": content}]
        body = self._body(reply.model, messages)
        self._key = self._key or routing_key(messages)
        sent_at = time.perf_counter()
        try:
            stream = stream_chunks(self._daemon, body, self._key, view.show_progress)
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    reply.usage = chunk.usage or reply.usage
                    reply.finish_reason = chunk.finish_reason or reply.finish_reason
                    if chunk.reasoning:
                        reply.reasoning += chunk.reasoning
                        view.show_reasoning(chunk.reasoning)
                    if chunk.content:
                        if reply.first_text_seconds is None:
                            reply.first_text_seconds = time.perf_counter() - sent_at
                        reply.text += chunk.content
                        reply.num_pieces += 1
                        view.write(chunk.content)
        finally:
            reply.total_seconds = time.perf_counter() - sent_at
        if reply.image is not None:
            counts_pixels = self.model.get("coordinates") == "pixels"
            image_size = reply.usage.last_seen if counts_pixels else None
            reply.regions = find_regions(reply.text, *([image_size] if image_size else []))

    def _body(self, model: str, messages: list[dict[str, Any]]) -> bytes:
        system = [{"role": "system", "content": self.system}] if self.system else []
        request = {
            "model": model,
            "messages": [*system, *messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            **parameters.fields(self.values),
        }
        return json.dumps(request).encode()
