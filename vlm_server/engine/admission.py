"""Whether a request finds room in device memory. Knows what requests hold and will; no rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from vlm_server.engine.governor import MIB, Demand, Governor, Refuse, Wait
from vlm_server.engine.request import Request
from vlm_server.errors import MemoryExceeded

_UNBOUNDED_ANSWER_TOKENS = 2048
"""What is put aside for an answer whose request names no `max_tokens`."""


class Admission:
    """Puts a request's needs into bytes, and asks the governor."""

    def __init__(
        self, governor: Governor, kv_bytes: Callable[[int], int], max_chunk_tokens: int
    ) -> None:
        """`kv_bytes`: see `ports.Runner.kv_bytes`."""
        self._governor = governor
        self._kv_bytes = kv_bytes
        self._max_chunk_tokens = max_chunk_tokens

    def admit(self, request: Request, admitted: Iterable[Request], *, is_settled: bool) -> bool:
        """Whether `request` may begin beside those `admitted`; else it waits.

        See `Governor.admit` for `is_settled`. Raises MemoryExceeded for one that could not even
        run alone.
        """
        admitted = list(admitted)
        demand = self._demand(request, admitted)
        promised = sum(self._promised(one) for one in admitted)
        others_run = bool(admitted) or not is_settled
        decision = self._governor.admit(
            demand, promised, others_run=others_run, is_settled=is_settled
        )
        if isinstance(decision, Refuse):
            raise MemoryExceeded(
                f"this request takes up to {decision.needed_bytes / MIB:.0f} MiB of device memory; "
                f"there are {decision.free_bytes / MIB:.0f} MiB beside the model"
            )
        if isinstance(decision, Wait):
            if not request.is_waiting_for_memory and is_settled:
                self._governor.note_wait()
                request.is_waiting_for_memory = True
            return False
        request.lasting_bytes = demand.lasting_bytes
        request.passing_bytes = demand.passing_bytes
        return True

    def fit_together(self, requests: Iterable[Request], admitted: Iterable[Request]) -> bool:
        """Whether these may have their worst moments at once; who is let in has it alone."""
        promised = sum(self._promised(one) for one in admitted)
        return self._governor.has_room(promised + sum(one.passing_bytes for one in requests))

    def _demand(self, request: Request, admitted: list[Request]) -> Demand:
        """Its rows until they end, beside those that run: all are as wide as the longest.

        At its worst moment, an encode, a chunk, or joining the others, who are copied with it;
        beside it its pictures' features, and once more as the prompt's embeddings.
        """
        prompt = request.prompt
        assert prompt is not None
        rows, length = len(request.choices), self._length(request)
        width = max([length, *(self._length(one) for one in admitted)])
        width_now = max([prompt.num_tokens, *(one.num_held_tokens[1] for one in admitted)])
        num_rows = rows + sum(len(one.rows) for one in admitted)
        theirs = sum(max(self._held(one), self._lasting(one)) for one in admitted)
        unknown = [span.end - span.start for span in prompt.images if span.features is None]
        num_media_tokens = sum(span.end - span.start for span in prompt.images) + sum(unknown)
        known = prompt.num_cached_tokens
        chunk = max(
            min(self._max_chunk_tokens, prompt.num_tokens - known), prompt.num_uncut_tokens - known
        )
        costs = self._governor.costs
        worst = max(
            costs.of("encode", max(unknown, default=0)),
            costs.of("prefill", chunk),
            num_rows * self._kv_bytes(width_now) if num_rows > 1 else 0,
        )
        return Demand(
            lasting_bytes=max(0, num_rows * self._kv_bytes(width) - theirs),
            passing_bytes=worst + num_media_tokens * costs.feature_bytes,
            alone_bytes=rows * self._kv_bytes(length),
        )

    @staticmethod
    def _length(request: Request) -> int:
        """Tokens of its prompt and its answer, at most."""
        assert request.prompt is not None
        answer = request.max_tokens
        if request.sampling.max_tokens is None:
            answer = min(answer, _UNBOUNDED_ANSWER_TOKENS)
        return request.prompt.num_tokens + answer

    def _held(self, request: Request) -> int:
        rows, tokens = request.num_held_tokens
        return rows * self._kv_bytes(tokens)

    @staticmethod
    def _lasting(request: Request) -> int:
        """Of what it was let in with, the share of the choices that have not ended."""
        return request.lasting_bytes * len(request.rows) // len(request.choices)

    def _promised(self, request: Request) -> int:
        """What it will still take of what it was let in with."""
        return max(0, self._lasting(request) - self._held(request))
