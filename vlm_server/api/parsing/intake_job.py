"""What an intake process gets: a body, and what to do with it behind it."""

from __future__ import annotations

import msgspec

from vlm_server.api.parsing.calls import Context
from vlm_server.platform.child.messages import Parts

_LENGTH_BYTES = 4


class Job(msgspec.Struct, frozen=True):
    """What a process has to do with a body."""

    dialect: str
    context: Context


def with_body(job: Job, body: bytearray) -> Parts:
    """`body` and `job` as one message; `body` is not copied."""
    encoded = msgspec.msgpack.encode(job)
    last = encoded + len(encoded).to_bytes(_LENGTH_BYTES)
    return Parts(len(body) + len(last), [body, last])


def take_job(body: bytearray) -> Job:
    """The job behind `body`, which is cut off from it."""
    end = len(body) - _LENGTH_BYTES
    start = end - int.from_bytes(body[end:])
    job = msgspec.msgpack.decode(body[start:end], type=Job)
    del body[start:]
    return job
