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

    def admit(self, request: Request, admitted: Iterable[Request]) -> bool:
        """Whether `request` may begin beside those `admitted`; else it waits.

        Raises MemoryExceeded for one that could not even begin alone.
        """
        admitted = list(admitted)
        demand = self._demand(request, admitted)
        promised = sum(self._promised(one) for one in admitted)
        decision = self._governor.admit(demand, promised, others_run=bool(admitted))
        if isinstance(decision, Refuse):
            raise MemoryExceeded(
                f"this request takes up to {decision.needed_bytes / MIB:.0f} MiB of device memory; "
                f"there are {decision.free_bytes / MIB:.0f} MiB beside the model"
            )
        if isinstance(decision, Wait):
            if not request.is_waiting_for_memory:
                self._governor.note_wait()
            request.is_waiting_for_memory = True
            return False
        request.lasting_bytes = demand.lasting_bytes
        return True

    def _demand(self, request: Request, admitted: list[Request]) -> Demand:
        """Its rows until they end; at its worst moment, an encode, a chunk, or joining the others.

        Rows that join are copied together with those that run.
        """
        prompt = request.prompt
        assert prompt is not None
        answer = request.max_tokens
        if request.sampling.max_tokens is None:
            answer = min(answer, _UNBOUNDED_ANSWER_TOKENS)
        rows = len(request.choices)
        lasting = rows * self._kv_bytes(prompt.num_tokens + answer)
        unknown = [span.end - span.start for span in prompt.images if span.features is None]
        chunk = min(self._max_chunk_tokens, prompt.num_tokens - prompt.num_cached_tokens)
        costs = self._governor.costs
        alone = max(
            costs.of("encode", max(unknown, default=0)),
            costs.of("prefill", chunk),
            rows * self._kv_bytes(prompt.num_tokens),
        )
        running = sum(self._held(one) for one in admitted)
        return Demand(lasting, alone + running, others_bytes=running)

    def _held(self, request: Request) -> int:
        rows, tokens = request.num_held_tokens
        return rows * self._kv_bytes(tokens)

    def _promised(self, request: Request) -> int:
        """What it will still take of what it was let in with."""
        return max(0, request.lasting_bytes - self._held(request))
