"""Plans and arrays as messages, and back."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from vlm_server.cache.prompt_key import MediaSpan
from vlm_server.interfaces import NewRequest, PrefillWork, PreparedPrompt, SchedulerOutput, SeqId
from vlm_server.protocol import SamplingParams
from vlm_server.runner.device.arrays import read
from vlm_server.runner.distributed.messages import Array, Chunk, Features, New, Plan, Segment
from vlm_server.runner.distributed.prefixes import FollowingPrefixes
from vlm_server.runner.vision.encoder import ImageFeatures

_PREFIX = "mlx.core."
_DTYPES = {
    str(each).removeprefix(_PREFIX): each
    for each in vars(mx).values()
    if isinstance(each, mx.Dtype)
}

# ---- plans -------------------------------------------------------------------------------


def message_of(plan: SchedulerOutput, dropped: tuple[int, ...]) -> Plan:
    """The part of `plan` that other ranks need. Waits for features that are new."""
    return Plan(
        finished_seqs=tuple(plan.finished_seqs),
        new=tuple(_new(request) for request in plan.new),
        decode=tuple(plan.decode),
        prefill=None if plan.prefill is None else _chunk(plan.prefill),
        prefill_with=tuple(map(_chunk, plan.prefill_with)),
        dropped=dropped,
    )


def plan_of(message: Plan, prefixes: FollowingPrefixes) -> SchedulerOutput:
    """The plan for this rank's runner. Raises KeyError for a segment that is not here."""
    return SchedulerOutput(
        finished_seqs=tuple(SeqId(*seq) for seq in message.finished_seqs),
        new=tuple(_request(new, prefixes) for new in message.new),
        decode=tuple(SeqId(*seq) for seq in message.decode),
        prefill=None if message.prefill is None else _work(message.prefill),
        prefill_with=tuple(map(_work, message.prefill_with)),
    )


def _new(request: NewRequest) -> New:
    prompt = request.prompt
    features: tuple[Any, ...] = request.features
    return New(
        request_id=request.request_id,
        n=request.sampling.n,
        token_ids=of_numpy(prompt.token_ids),
        spans=tuple((span.start, span.end, span.mm_hash) for span in prompt.spans),
        positions=None if prompt.positions is None else of_numpy(prompt.positions),
        token_types=None if prompt.token_types is None else of_numpy(prompt.token_types),
        rope_delta=prompt.rope_delta,
        snapshot_points=prompt.snapshot_points,
        atomic_prefill_tokens=prompt.atomic_prefill_tokens,
        prefix=tuple(Segment(s.number, num_tokens) for s, num_tokens in request.prefix.segments),
        features=tuple(map(_features, features)),
    )


def _request(new: New, prefixes: FollowingPrefixes) -> NewRequest:
    """Of rank 0's sampling parameters only the number of answers matters here."""
    prompt = PreparedPrompt(
        token_ids=to_numpy(new.token_ids),
        spans=tuple(MediaSpan(*span) for span in new.spans),
        positions=None if new.positions is None else to_numpy(new.positions),
        token_types=None if new.token_types is None else to_numpy(new.token_types),
        rope_delta=new.rope_delta,
        snapshot_points=new.snapshot_points,
        atomic_prefill_tokens=new.atomic_prefill_tokens,
    )
    return NewRequest(
        new.request_id,
        prompt,
        SamplingParams(n=new.n),
        prefixes.prefix(new.prefix),
        tuple(map(_image, new.features)),
    )


def _features(made: ImageFeatures) -> Features:
    return Features(of_mlx(made.rows), _packed(made.visual_mask), _packed(made.deepstack))


def _packed(array: Any) -> Array | None:
    return None if array is None else of_mlx(array)


def _image(features: Features) -> ImageFeatures:
    mask, deepstack = features.visual_mask, features.deepstack
    return ImageFeatures(
        rows=to_mlx(features.rows),
        visual_mask=None if mask is None else to_mlx(mask),
        deepstack=None if deepstack is None else to_mlx(deepstack),
    )


def _chunk(work: PrefillWork) -> Chunk:
    return Chunk(work.request_id, work.start, work.end, work.is_last)


def _work(chunk: Chunk) -> PrefillWork:
    return PrefillWork(chunk.request_id, chunk.start, chunk.end, chunk.is_last)


# ---- arrays ------------------------------------------------------------------------------


def of_numpy(array: NDArray[Any]) -> Array:
    """A copy of `array` as a message."""
    return Array(array.dtype.name, array.shape, array.tobytes())


def to_numpy(array: Array) -> NDArray[Any]:
    """A read-only view of the bytes of `array`."""
    return np.frombuffer(array.data, dtype=array.dtype).reshape(array.shape)


def of_mlx(array: mx.array) -> Array:
    """A copy of `array` as a message; waits for the device."""
    name = str(array.dtype).removeprefix(_PREFIX)
    raw = read(mx.contiguous(array).reshape(-1).view(mx.uint8))  # numpy has no bfloat16
    return Array(name, tuple(array.shape), raw.tobytes())


def to_mlx(array: Array) -> mx.array:
    """A new array on the device."""
    raw = mx.array(np.frombuffer(array.data, dtype=np.uint8))
    return raw.view(_DTYPES[array.dtype]).reshape(array.shape)
