"""Whether there is device memory for one more request, given what others hold and will need."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vlm_server.engine.memory import decisions
from vlm_server.engine.memory.decisions import Demand
from vlm_server.engine.memory.governor import MIB, Governor
from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State
from vlm_server.errors import MemoryExceeded

_UNBOUNDED_ANSWER_TOKENS = 2048
"""What is reserved for an answer that may fill the context, as hardly any does."""


@dataclass(frozen=True, slots=True)
class Admit:
    """It may begin. `transient_bytes` are reserved for its peak."""

    transient_bytes: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now: others hold the memory that it needs."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """It could not even run alone."""

    error: MemoryExceeded


class Admission:
    """Puts the needs of requests into bytes, and asks the governor. Changes no request."""

    def __init__(
        self, governor: Governor, kv_bytes: Callable[[int], int], max_chunk_tokens: int
    ) -> None:
        """`kv_bytes`: see `ports.Runner.kv_bytes`."""
        self._governor = governor
        self._kv_bytes = kv_bytes
        self._max_chunk_tokens = max_chunk_tokens
        self._last_waiting: str | None = None
        """The request that was last told to wait: each is counted once."""

    def decide(
        self, request: Request, admitted: Iterable[Request], *, is_settled: bool
    ) -> Admit | Wait | Refuse:
        """Whether `request` may begin beside those `admitted`; see `Governor.admit`."""
        admitted = list(admitted)
        transient = self._transient(request, admitted)
        theirs = [one.transient_bytes for one in admitted if one.state is not State.DECODE]
        together = self._resident([request, *admitted])
        decision = self._governor.admit(
            Demand(
                resident_bytes=together - self._resident(admitted) + request.load_bytes,
                transient_bytes=max([transient, *theirs]),
                alone_bytes=self._resident([request]),
            ),
            self._reserved(admitted),
            others_run=bool(admitted) or not is_settled,
            is_settled=is_settled,
        )
        match decision:
            case decisions.Refuse(needed_bytes, free_bytes):
                largest = self._largest_answer(request, free_bytes)
                advice = f" `max_tokens` may be at most {largest}." if largest else ""
                return Refuse(
                    MemoryExceeded(
                        f"This request needs up to {needed_bytes / MIB:.0f} MiB of device memory; "
                        f"{free_bytes / MIB:.0f} MiB are available beside the model.{advice}",
                        "max_tokens" if largest else None,
                    )
                )
            case decisions.Wait():
                if is_settled and self._last_waiting != request.request_id:
                    self._last_waiting = request.request_id
                    self._governor.note_wait()
                return Wait()
            case _:
                return Admit(transient)

    def may_load(self, request: Request) -> bool:
        """Whether what the disk has of `request` fits beside it, if it runs alone.

        If not, it is computed instead: nothing is read that no memory can be reserved for.
        """
        load = request.load
        if load is None:
            return True
        taken = load.size_bytes + load.transient_bytes
        return self._resident([request]) + taken <= self._governor.free_bytes

    def reserved_bytes(self, admitted: Iterable[Request]) -> int:
        """What those `admitted` may still allocate until they end."""
        return self._reserved(list(admitted))

    def make_room_for_reserved(self, admitted: Iterable[Request]) -> None:
        """Evict what was cached since, if it takes room that is reserved for `admitted`."""
        if reserved := self._reserved(list(admitted)):
            self._governor.make_room_for_reserved(reserved)

    def fit_together(self, requests: Iterable[Request], admitted: Iterable[Request]) -> bool:
        """Whether these may have their peaks at once; each was admitted for its own."""
        reserved = self._reserved(list(admitted))
        return self._governor.has_room(reserved + sum(one.transient_bytes for one in requests))

    def fits_encode(
        self, num_tokens: int, requests: Iterable[Request], admitted: Iterable[Request]
    ) -> bool:
        """Whether media of so many tokens of these may be encoded in one call.

        Each was admitted for the encode of one at a time, and with the features of all its media.
        """
        needed = self._governor.estimator.of("encode", num_tokens)
        needed += sum(one.transient_bytes for one in requests)
        return self._governor.has_room(self._reserved(list(admitted)) + needed)

    def fits_prefill(
        self, num_tokens: int, requests: Sequence[Request], admitted: Iterable[Request]
    ) -> bool:
        """Whether prompts of these, of at most `num_tokens` each, may be prefilled in one call.

        Each was admitted for its own prefill, and for joining those that run. Beside that is the
        cache that all are read into.
        """
        needed = self._governor.estimator.of("prefill", len(requests) * num_tokens)
        longest = max(one.prompt.num_tokens for one in requests)
        needed += len(requests) * self._kv_bytes(longest)
        needed += max(one.transient_bytes for one in requests)
        return self._governor.has_room(self._reserved(list(admitted)) + needed)

    def _transient(self, request: Request, admitted: list[Request]) -> int:
        """Bytes at its peak: of a read from disk, an encode, a chunk, or joining the others.

        Joining copies all sequences once. Its media's features come on top, and a second time
        as part of the prompt's embeddings.
        """
        prompt, cached = request.prompt, request.num_cached_tokens
        together = [request, *admitted]
        to_encode = request.spans_to_encode
        chunk = max(
            min(self._max_chunk_tokens, prompt.num_tokens - cached),
            prompt.atomic_prefill_tokens - cached,
        )
        estimator = self._governor.estimator
        joining = self._side_by_side(together, _width_when_joined) if _num_seqs(together) > 1 else 0
        worst = max(
            estimator.of("encode", max(to_encode, default=0)),
            estimator.of("prefill", chunk),
            joining,
            0 if request.load is None else request.load.transient_bytes,
        )
        features = request.num_media_tokens + sum(to_encode)
        return worst + features * estimator.feature_bytes

    def _reserved(self, admitted: list[Request]) -> int:
        """Bytes that they, and what is read for them, will take until they end."""
        decoding = [one for one in admitted if one.state is State.DECODE]
        held = self._side_by_side(decoding, lambda one: one.num_kv_tokens)
        held += sum(
            self._kv_bytes(one.num_kv_tokens)
            for one in admitted
            if one.state is State.PREFILL and one.is_known_to_runner
        )
        to_load = sum(one.load_bytes for one in admitted)
        return max(0, self._resident(admitted) - held) + to_load

    def _resident(self, requests: list[Request]) -> int:
        """Bytes of their KV as it will be when the longest of them ends."""
        return self._side_by_side(requests, _final_width)

    def _largest_answer(self, request: Request, free_bytes: int) -> int:
        """Tokens of the longest answer for which there is memory; 0 if there is none for any."""

        def is_too_long(num_tokens: int) -> bool:
            width = request.prompt.num_tokens + num_tokens
            return self._side_by_side([request], lambda _: width) > free_bytes

        return bisect_left(range(1, request.max_tokens + 1), True, key=is_too_long)

    def _side_by_side(self, requests: list[Request], width: Callable[[Request], int]) -> int:
        """Bytes of one batch: all its sequences are padded to the longest."""
        return _num_seqs(requests) * self._kv_bytes(max(map(width, requests), default=0))


def _num_seqs(requests: list[Request]) -> int:
    return sum(len(one.seqs) for one in requests)


def _final_width(request: Request) -> int:
    """Tokens of its prompt and its answer, at most."""
    answer = request.max_tokens
    wanted = request.sampling.max_tokens
    if wanted is None or wanted > answer:
        answer = min(answer, _UNBOUNDED_ANSWER_TOKENS)
    return request.prompt.num_tokens + answer


def _width_when_joined(request: Request) -> int:
    """Tokens of its sequences when the next one joins, if that were now."""
    return max(request.prompt.num_tokens, request.num_kv_tokens)
