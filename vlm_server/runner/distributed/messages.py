"""What rank 0 tells the others, and they answer: msgpack, no code, no pickle."""

from __future__ import annotations

import msgspec

from vlm_server import settings
from vlm_server.runner.distributed.arrays import Array

# ---- before the first plan ---------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A rank has come.

    suitable_bytes: what suits its device. kind: of its device. program: see `program_digest`.
    """

    rank: int
    suitable_bytes: int
    kind: str
    program: str


class Join(msgspec.Struct, frozen=True, tag="join"):
    """All ranks are here, and alike: MLX may connect them."""


class Limit(msgspec.Struct, frozen=True, tag="limit"):
    """The device memory of each rank."""

    memory: settings.Memory


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Load your part of this model."""

    model: settings.Model


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """It is loaded, from the checkpoint with this `fingerprint`."""

    fingerprint: str


class NotLoaded(msgspec.Struct, frozen=True, tag="not_loaded"):
    reason: str


class Serve(msgspec.Struct, frozen=True, tag="serve"):
    """Plans come now. stores_prefixes: whether each prompt's state is followed by `Stored`."""

    stores_prefixes: bool


# ---- a step ------------------------------------------------------------------------------


class Features(msgspec.Struct, frozen=True, array_like=True):
    """What the encoder made of one span: see `ImageFeatures`."""

    rows: Array
    visual_mask: Array | None
    deepstack: Array | None


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """The first `num_tokens` tokens of a stored segment."""

    number: int
    num_tokens: int


class New(msgspec.Struct, frozen=True):
    """A request that a plan prefills first; see `NewRequest` and `PreparedPrompt`."""

    request_id: str
    n: int
    token_ids: Array
    spans: tuple[tuple[int, int, str], ...]
    positions: Array | None
    token_types: Array | None
    rope_delta: int
    snapshot_points: tuple[int, ...]
    atomic_prefill_tokens: int
    prefix: tuple[Segment, ...]
    features: tuple[Features, ...]


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """See `PrefillWork`."""

    request_id: str
    start: int
    end: int
    is_last: bool


class Plan(msgspec.Struct, frozen=True, tag="plan"):
    """The runner's part of a `SchedulerOutput`. dropped: stored segments that nobody needs."""

    finished_seqs: tuple[tuple[str, int], ...]
    new: tuple[New, ...]
    decode: tuple[tuple[str, int], ...]
    prefill: Chunk | None
    prefill_with: tuple[Chunk, ...]
    dropped: tuple[int, ...]


class Taken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """Tokens `start` to `end` of what is being stored became segment `number`."""

    number: int
    start: int
    end: int


class Split(msgspec.Struct, frozen=True, array_like=True, tag="split"):
    """Segment `number` was split after `at` tokens into two."""

    number: int
    at: int
    first: int
    rest: int


class Stored(msgspec.Struct, frozen=True, tag="stored"):
    """What the prefix cache took of the prompt, or answer, that is stored now."""

    changes: tuple[Taken | Split, ...]


class PlanAhead(msgspec.Struct, frozen=True, tag="plan_ahead"):
    """See `Runner.plan_ahead`."""


class SetLimit(msgspec.Struct, frozen=True, tag="set_limit"):
    """See `DeviceMemory.set_limit`."""

    limit_bytes: int


class Clear(msgspec.Struct, frozen=True, tag="clear"):
    """See `DeviceMemory.clear`. dropped: as in `Plan`, since what they hold is to be free, too."""

    dropped: tuple[int, ...]


Answer = Hello | Loaded | NotLoaded
Message = Join | Limit | Load | Serve | Plan | Stored | PlanAhead | SetLimit | Clear

encode = msgspec.msgpack.Encoder().encode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
decode_message = msgspec.msgpack.Decoder(Message).decode
