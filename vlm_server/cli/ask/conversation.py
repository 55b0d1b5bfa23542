"""A conversation with one model: the messages so far, and the next answer as it arrives."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from vlm_server.cli.ask.media import Medium
from vlm_server.cli.ask.regions import Region, find_regions
from vlm_server.cli.client.answer import AnswerUsage
from vlm_server.cli.client.chat import routing_key, stream_chunks
from vlm_server.cli.client.daemon import Daemon

OnText = Callable[[str], None]


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


class ChatSession:
    """The messages of a conversation; each question is sent with all earlier messages."""

    def __init__(
        self, daemon: Daemon, model: dict[str, Any], max_tokens: int | None, system: str | None
    ) -> None:
        self._daemon = daemon
        self._model = str(model["id"])
        self._counts_pixels = model.get("coordinates") == "pixels"
        self._options = {} if max_tokens is None else {"max_tokens": max_tokens}
        self._system = system
        self._messages: list[dict[str, Any]] = []
        self._image: Medium | None = None
        self._key = ""

    def __len__(self) -> int:
        return len(self._messages)

    def forget(self) -> None:
        """Start a new conversation."""
        self._messages, self._image, self._key = [], None, ""

    async def ask(self, media: Sequence[Medium], question: str, on_text: OnText) -> ChatReply:
        """The answer to `question`; `on_text` gets its pieces. Raises CommandFailed.

        An answer cut off by an interrupt is kept in the conversation; a failed question is not.
        """
        content = [*(medium.part for medium in media), {"type": "text", "text": question}]
        messages = [*self._messages, {"role": "user", "content": content}]
        images = [medium for medium in media if medium.is_image]
        image = images[-1] if images else self._image
        reply = ChatReply(self._model, image=image)
        try:
            await self._receive(reply, messages, on_text)
        finally:
            if reply.text:
                self._messages = [*messages, {"role": "assistant", "content": reply.text}]
                self._image = image
        return reply

    async def _receive(
        self, reply: ChatReply, messages: list[dict[str, Any]], on_text: OnText
    ) -> None:
        system = [{"role": "system", "content": self._system}] if self._system else []
        request = {
            "model": self._model,
            "messages": [*system, *messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        body = json.dumps(request).encode()
        self._key = self._key or routing_key(messages)
        sent_at = time.perf_counter()
        async with aclosing(stream_chunks(self._daemon, body, self._key)) as chunks:
            async for chunk in chunks:
                reply.usage = chunk.usage or reply.usage
                reply.finish_reason = chunk.finish_reason or reply.finish_reason
                reply.reasoning += chunk.reasoning
                if chunk.content:
                    if reply.first_text_seconds is None:
                        reply.first_text_seconds = time.perf_counter() - sent_at
                    reply.text += chunk.content
                    reply.num_pieces += 1
                    on_text(chunk.content)
        reply.total_seconds = time.perf_counter() - sent_at
        if reply.image is not None:
            image_size = reply.usage.last_seen if self._counts_pixels else None
            reply.regions = find_regions(reply.text, *([image_size] if image_size else []))
