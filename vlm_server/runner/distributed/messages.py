"""Messages between rank 0 and the other ranks: msgpack, no code, no pickle."""

from __future__ import annotations

import dataclasses
from typing import Any, get_origin

import mlx.core as mx
import msgspec
import numpy as np

from vlm_server import settings
from vlm_server.interfaces import NewRequest, PrefillWork, PreparedPrompt, SchedulerOutput, SeqId
from vlm_server.runner.device.arrays import to_numpy
from vlm_server.runner.encode.encoder import ImageFeatures

_PREFIX = "mlx.core."
_DTYPES = {
    str(dtype).removeprefix(_PREFIX): dtype
    for dtype in vars(mx).values()
    if isinstance(dtype, mx.Dtype)
}

# ---- before the first plan ---------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A rank's arrival, with its device and program (`program_digest`)."""

    rank: int
    suitable_bytes: int
    kind: str
    program: str


class Join(msgspec.Struct, frozen=True, tag="join"):
    """The order to let MLX connect the ranks: all have arrived and agree."""


class Limit(msgspec.Struct, frozen=True, tag="limit"):
    """The settings of each rank's device memory."""

    memory: settings.MemorySettings


class Load(msgspec.Struct, frozen=True, tag="load"):
    """The order to load this rank's shard of `model`."""

    model: settings.ModelSettings


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """A rank's report that it has loaded, with its checkpoint's fingerprint."""

    fingerprint: str


class NotLoaded(msgspec.Struct, frozen=True, tag="not_loaded"):
    """A rank's failure to load."""

    reason: str


class Serve(msgspec.Struct, frozen=True, tag="serve"):
    """The announcement that plans follow. `num_draft_tokens`: see `speculation_of`."""

    num_draft_tokens: int


# ---- a step ------------------------------------------------------------------------------


class SegmentRef(msgspec.Struct, frozen=True, array_like=True):
    """The first `num_tokens` tokens of a stored segment."""

    number: int
    num_tokens: int


class New(msgspec.Struct, frozen=True):
    """A `NewRequest`; of its sampling parameters, followers need the number of answers alone."""

    request_id: str
    prompt: PreparedPrompt
    n: int
    prefix: tuple[SegmentRef, ...]
    features: tuple[ImageFeatures, ...]

    @classmethod
    def of(cls, request: NewRequest) -> New:
        """The message of `request`, without parts of the prompt that rank 0 alone needs."""
        features: tuple[Any, ...] = request.features
        prompt = dataclasses.replace(
            request.prompt,
            grammar=None,
            cache_salt="",
            answer_format=None,
            prediction=(),
            images=(),
            videos=(),
        )
        prefix = tuple(
            SegmentRef(s.number, num_tokens) for s, num_tokens in request.prefix.segments
        )
        return cls(request.request_id, prompt, request.sampling.n, prefix, features)


class RankPlan(msgspec.Struct, frozen=True, tag="plan"):
    """The runner's part of a `SchedulerOutput`. dropped: stored segments to free."""

    finished_seqs: tuple[SeqId, ...]
    stored_prompts: tuple[str, ...]
    stored_answers: tuple[SeqId, ...]
    new: tuple[New, ...]
    decode: tuple[SeqId, ...]
    prefills: tuple[PrefillWork, ...]
    dropped: tuple[int, ...]

    @classmethod
    def of(cls, plan: SchedulerOutput, dropped: tuple[int, ...]) -> RankPlan:
        """The message of `plan`."""
        return cls(
            finished_seqs=plan.finished_seqs,
            stored_prompts=plan.stored_prompts,
            stored_answers=plan.stored_answers,
            new=tuple(map(New.of, plan.new)),
            decode=plan.decode,
            prefills=plan.prefills,
            dropped=dropped,
        )


class Drafts(msgspec.Struct, frozen=True, tag="drafts"):
    """Rank 0's choice of the tokens of each row of the next step, and of the drafts among them.

    A `width` of 1 is a plain step.
    """

    width: int = 1
    token_ids: tuple[tuple[int, ...], ...] = ()


class Taken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """The new segment `number`: tokens `start` to `end` of the prompt being stored."""

    number: int
    start: int
    end: int


class Split(msgspec.Struct, frozen=True, array_like=True, tag="split"):
    """The split of segment `number` after `at` tokens into `first` and `rest`."""

    number: int
    at: int
    first: int
    rest: int


class Stored(msgspec.Struct, frozen=True, tag="stored"):
    """The changes in the prefix cache from storing one prompt or answer."""

    changes: tuple[Taken | Split, ...]


class PrecompileNext(msgspec.Struct, frozen=True, tag="precompile_next"):
    """See `Runner.precompile_next`."""


class SetLimit(msgspec.Struct, frozen=True, tag="set_limit"):
    """See `DeviceMemory.set_limit`."""

    limit_bytes: int


class Clear(msgspec.Struct, frozen=True, tag="clear"):
    """See `DeviceMemory.clear`. dropped: segments to free first, as in `RankPlan`."""

    dropped: tuple[int, ...]


Answer = Hello | Loaded | NotLoaded
Message = (
    Join | Limit | Load | Serve | RankPlan | Drafts | Stored | PrecompileNext | SetLimit | Clear
)

# ---- as bytes ----------------------------------------------------------------------------


def _pack(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Type, shape and row-major bytes of an array of numpy or MLX; waits for the device."""
    if isinstance(array, np.ndarray):
        return array.dtype.name, array.shape, array.tobytes()
    if isinstance(array, mx.array):
        raw = to_numpy(mx.contiguous(array).reshape(-1).view(mx.uint8))  # numpy has no bfloat16
        return str(array.dtype).removeprefix(_PREFIX), tuple(array.shape), raw.tobytes()
    raise NotImplementedError(f"{type(array).__name__} is no message")


def _unpack(kind: type, packed: Any) -> Any:
    """A read-only view of the bytes as an array of numpy, or a new array on the device."""
    dtype, shape, data = msgspec.convert(packed, tuple[str, tuple[int, ...], bytes])
    if get_origin(kind) is np.ndarray:
        return np.frombuffer(data, dtype=dtype).reshape(shape)
    raw = mx.array(np.frombuffer(data, dtype=np.uint8))
    return raw.view(_DTYPES[dtype]).reshape(shape)


encode = msgspec.msgpack.Encoder(enc_hook=_pack).encode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
decode_message = msgspec.msgpack.Decoder(Message, dec_hook=_unpack).decode
