"""The outcome of a job in a child process: a struct of the job's kind, or an error."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct, msgpack

from vlm_server.errors import RequestError
from vlm_server.platform.child.serve import ChildLimits, serve


class SentError(Struct, frozen=True, tag=True):
    """A RequestError on its way between processes: see `errors.RequestError.from_code`."""

    code: str
    message: str
    param: str | None

    @classmethod
    def of(cls, error: RequestError) -> SentError:
        return cls(error.code, error.message, error.param)

    def received(self) -> RequestError:
        return RequestError.from_code(self.code, self.message, self.param)


def serve_outcomes(
    work: Callable[[bytearray], Struct], limits: ChildLimits, no_memory: RequestError | None = None
) -> None:
    """Answer jobs until the input ends, each with what `work` returns, or its RequestError.

    no_memory: the error for a job that takes too much; without one, the process ends.
    """

    def answer(job: bytearray) -> bytes:
        try:
            return msgpack.encode(work(job))
        except RequestError as error:
            return msgpack.encode(SentError.of(error))
        except MemoryError:
            if no_memory is None:
                raise
            return msgpack.encode(SentError.of(no_memory))

    serve(answer, limits)
