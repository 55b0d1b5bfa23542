"""Whether a request finds room in device memory. Knows what requests hold and will; no rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from vlm_server.engine.memory.governor import MIB, Demand, Governor, Refuse, Wait
from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State
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
        transient = self._transient(request, admitted)
        theirs = [one.transient_bytes for one in admitted if one.state is not State.DECODE]
        together = self._resident([request, *admitted])
        decision = self._governor.admit(
            Demand(
                resident_bytes=together - self._resident(admitted),
                transient_bytes=max([transient, *theirs]),
                alone_bytes=self._resident([request]),
            ),
            self._reserved(admitted),
            others_run=bool(admitted) or not is_settled,
            is_settled=is_settled,
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
        request.transient_bytes = transient
        return True

    def make_room_for_reserved(self, admitted: Iterable[Request]) -> None:
        """Have what was cached meanwhile give way to what those let in will still take."""
        if reserved := self._reserved(list(admitted)):
            self._governor.make_room_for_reserved(reserved)

    def fit_together(self, requests: Iterable[Request], admitted: Iterable[Request]) -> bool:
        """Whether these may have their worst moments at once; who is let in has it alone."""
        reserved = self._reserved(list(admitted))
        return self._governor.has_room(reserved + sum(one.transient_bytes for one in requests))

    def _transient(self, request: Request, admitted: list[Request]) -> int:
        """What it takes at its worst moment: an encode, a chunk, or joining the others.

        These are copied with it. Beside it its pictures' features, and once more as the prompt's
        embeddings.
        """
        prompt = request.prompt
        assert prompt is not None
        together = [request, *admitted]
        unknown = [span.end - span.start for span in prompt.images if span.features is None]
        num_media_tokens = sum(span.end - span.start for span in prompt.images) + sum(unknown)
        known = prompt.num_cached_tokens
        chunk = max(
            min(self._max_chunk_tokens, prompt.num_tokens - known),
            prompt.atomic_prefill_tokens - known,
        )
        estimator = self._governor.estimator
        worst = max(
            estimator.of("encode", max(unknown, default=0)),
            estimator.of("prefill", chunk),
            self._side_by_side(together, _width_when_joined) if _num_rows(together) > 1 else 0,
        )
        return worst + num_media_tokens * estimator.feature_bytes

    def _reserved(self, admitted: list[Request]) -> int:
        """What they will still take until they end."""
        decoding = [one for one in admitted if one.state is State.DECODE]
        held = self._side_by_side(decoding, lambda one: one.num_held_tokens[1])
        for one in admitted:
            if one.state is State.PREFILL and one.is_known_to_runner:
                held += self._kv_bytes(one.num_held_tokens[1])
        return max(0, self._resident(admitted) - held)

    def _resident(self, requests: list[Request]) -> int:
        """Their rows as they will be when the longest of them ends."""
        return self._side_by_side(requests, _final_width)

    def _side_by_side(self, requests: list[Request], width: Callable[[Request], int]) -> int:
        """Rows of one batch: all are as wide as the longest."""
        return _num_rows(requests) * self._kv_bytes(max(map(width, requests), default=0))


def _num_rows(requests: list[Request]) -> int:
    return sum(len(one.rows) for one in requests)


def _final_width(request: Request) -> int:
    """Tokens of its prompt and its answer, at most."""
    assert request.prompt is not None
    answer = request.max_tokens
    if request.sampling.max_tokens is None:
        answer = min(answer, _UNBOUNDED_ANSWER_TOKENS)
    return request.prompt.num_tokens + answer


def _width_when_joined(request: Request) -> int:
    """Tokens that a row has when the next one joins, if that were now."""
    assert request.prompt is not None
    return max(request.prompt.num_tokens, request.num_held_tokens[1])
