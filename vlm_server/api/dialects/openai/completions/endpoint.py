"""`POST /v1/completions`: the legacy text completions, without a chat template."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from vlm_server import protocol
from vlm_server.api.dialects.openai.completions.intake import DIALECT, read
from vlm_server.api.dialects.openai.options import Options, decode_options
from vlm_server.api.dialects.openai.render import Usage, usage_of
from vlm_server.api.http import errors, sse
from vlm_server.errors import RequestError

_IMPOSSIBLE = -9999.0
"""OpenAI's value for minus infinity, which JSON does not have."""


class Logprobs(msgspec.Struct, frozen=True):
    """One entry for each token; `text_offset` counts characters of the tokens before it."""

    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[str, float], ...]
    text_offset: tuple[int, ...]


class Choice(msgspec.Struct, frozen=True):
    text: str
    index: int
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class Completion(msgspec.Struct, frozen=True, tag_field="object", tag="text_completion"):
    """A whole answer, or a chunk of one."""

    id: str
    created: int
    model: str
    choices: tuple[Choice, ...]
    usage: Usage | UnsetType | None = UNSET


_encode = msgspec.json.Encoder().encode


class Completions:
    """Text completions, as a `Dialect`."""

    name = DIALECT
    id_prefix = "cmpl-"
    content_type = sse.CONTENT_TYPE
    read_text = staticmethod(read)

    def renderer(self, request_id: str, model: str, options: bytes) -> CompletionRenderer:
        """See `Dialect.renderer`."""
        return CompletionRenderer(request_id, model, decode_options(options))


@dataclass(frozen=True, slots=True)
class CompletionRenderer:
    """The JSON of one answer: a whole completion, or its chunks."""

    id: str
    model: str
    options: Options
    created: int = field(default_factory=lambda: int(time.time()))
    _offsets: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Characters of the tokens of each choice so far."""

    def whole(
        self, choices: Sequence[Sequence[protocol.Delta]], finished: protocol.Finished
    ) -> bytes:
        """The whole answer."""
        answers = tuple(self._choice(deltas) for deltas in choices)
        usage = usage_of(finished.usage)
        return _encode(Completion(self.id, self.created, self.model, answers, usage))

    def delta(self, delta: protocol.Delta) -> bytes:
        """One chunk."""
        usage: Usage | UnsetType | None = None if self.options.include_usage else UNSET
        if self.options.continuous_usage and delta.usage is not None:
            usage = usage_of(delta.usage)
        choice = self._choice((delta,))
        return sse.event(_encode(Completion(self.id, self.created, self.model, (choice,), usage)))

    def end(self, finished: protocol.Finished) -> bytes:
        """The usage, if the client wants it, and `[DONE]`."""
        if not self.options.include_usage:
            return sse.DONE
        last = Completion(self.id, self.created, self.model, (), usage_of(finished.usage))
        return sse.event(_encode(last)) + sse.DONE

    def error(self, error: RequestError) -> bytes:
        """An event with the error, and no `[DONE]`."""
        return sse.event(errors.encode_openai(error))

    def keep_alive(self) -> bytes:
        """A comment: every reader of events skips it."""
        return sse.KEEP_ALIVE

    def empty_chunk(self) -> bytes:
        """A chunk with an empty text."""
        return self.delta(protocol.Delta(self.id, ""))

    def _choice(self, deltas: Sequence[protocol.Delta]) -> Choice:
        """What `deltas` say of one choice."""
        last = deltas[-1]
        entries = [entry for delta in deltas for entry in delta.logprobs]
        return Choice(
            text="".join(delta.text for delta in deltas),
            index=last.choice,
            logprobs=self._logprobs(last.choice, entries) if entries else None,
            finish_reason=last.finish_reason,
        )

    def _logprobs(self, choice: int, entries: Sequence[protocol.TokenLogprob]) -> Logprobs:
        offsets = []
        for entry in entries:
            offsets.append(self._offsets[choice])
            self._offsets[choice] += len(entry.token.text)
        return Logprobs(
            tokens=tuple(entry.token.text for entry in entries),
            token_logprobs=tuple(_finite(entry.token.logprob) for entry in entries),
            top_logprobs=tuple(
                {top.text: _finite(top.logprob) for top in reversed(entry.top)} for entry in entries
            ),
            text_offset=tuple(offsets),
        )


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE
