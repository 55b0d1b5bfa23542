"""Which pictures are encoded in one call, so that nobody's first token comes later for it.

In turn, a request is prefilled before the next one's pictures are encoded. So what can be encoded
at once, if measurements say that it is sooner, is

- what would be encoded one after the other anyway, until a prompt's turn: the pictures of one
  request, or of two that take turns;
- a picture each of two requests, if both take about as long as one.

What runs beside an encode takes longer, until that ends. So it is one picture while a text waits
for its prefill, and beside a prompt's last chunk. While answers are written, an encode of several
lasts no longer than a prefill chunk may; otherwise, as long as one who comes meanwhile can wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

from vlm_server.engine.memory.admission import Admission
from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State
from vlm_server.engine.scheduler.arbiter import EncoderPrefillArbiter
from vlm_server.engine.scheduler.batching.encode_sizer import EncodeSizer
from vlm_server.engine.scheduler.limits import SchedulerConfig
from vlm_server.engine.scheduler.requests import Requests
from vlm_server.interfaces import EncodeWork

_MOST_SECONDS = 0.25
"""Of an encode of several pictures, while nobody is answered: who comes meanwhile waits for it."""


class EncodeBatcher:
    """Adds to a picture what is encoded with it. Only reads requests."""

    def __init__(
        self,
        config: SchedulerConfig,
        requests: Requests,
        arbiter: EncoderPrefillArbiter,
        admission: Admission,
    ) -> None:
        self._most = config.max_images_per_encode
        self._max_step_seconds = config.max_step_seconds
        self._requests = requests
        self._arbiter = arbiter
        self._admission = admission
        self._sizer = EncodeSizer(self._most)

    def note(self, works: Sequence[EncodeWork], seconds: float | None) -> None:
        """`works` took `seconds` together, with no prompt's chunk beside them; see `EncodeDone`.

        What fails does not pay: each is then encoded once more.
        """
        if seconds is not None and (len(works) > 1 or math.isfinite(seconds)):
            self._sizer.note(works[0].num_tokens, len(works), seconds)

    def together(self, request: Request, first: EncodeWork) -> list[EncodeWork]:
        """`first`, whose turn it is and which is of `request`, and what is encoded with it."""
        if self._most == 1 or self._arbiter.texts_wait:
            return [first]
        works = [first, *islice(self._run(request, first), self._most - 1)]
        count = self._sizer.at_once(first.num_tokens, len(works), self._most_seconds)
        if len(works) == 1:
            works += self._next(request, first)
            as_one = self._sizer.two_are_as_one(first.num_tokens, self._max_step_seconds)
            count = 2 if len(works) == 2 and as_one else 1
        while count > 1 and not self._fit(works[:count]):
            count //= 2
        return works[:count]

    def _run(self, request: Request, first: EncodeWork) -> Iterator[EncodeWork]:
        """What would be encoded after `first`, of its size, until it is a prompt's turn."""
        own = request.media_to_encode()
        next(own, None)  # that is `first`, unless the disk reader has just put it into memory
        media, seen = {request.request_id: own}, {first.span.mm_hash}
        for turn in self._arbiter.encodes_after(request):
            work = next(media.setdefault(turn.request_id, turn.media_to_encode()), None)
            if work is None or work.size != first.size or work.span.mm_hash in seen:
                return
            seen.add(work.span.mm_hash)
            yield work

    def _next(self, request: Request, first: EncodeWork) -> list[EncodeWork]:
        """The first picture of the request that comes after `request`, if it can go with `first`.

        Nothing if another request is begun already: at most two ever are.
        """
        others = [r for r in self._requests.in_state(State.ENCODING) if r is not request]
        if any(r.is_begun for r in (*others, *self._requests.in_state(State.PREFILL))):
            return []
        waiting = next(iter(others), None)
        work = next(waiting.media_to_encode(), None) if waiting else None
        if work is None or work.size != first.size or work.span.mm_hash == first.span.mm_hash:
            return []
        return [work]

    @property
    def _most_seconds(self) -> float:
        is_decoding = any(self._requests.in_state(State.DECODE))
        return self._max_step_seconds if is_decoding else _MOST_SECONDS

    def _fit(self, works: Sequence[EncodeWork]) -> bool:
        """Whether there is memory for all at once; for each alone it is reserved."""
        num_tokens = sum(work.num_tokens for work in works)
        requests = [self._requests[name] for name in {work.request_id for work in works}]
        return self._admission.fits_encode(num_tokens, requests, self._requests.admitted)
