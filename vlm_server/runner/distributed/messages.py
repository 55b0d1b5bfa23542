"""Messages between rank 0 and the other ranks: msgpack, no code, no pickle."""

from __future__ import annotations

import msgspec

from vlm_server import settings

# ---- before the first plan ---------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A rank's arrival. suitable_bytes and kind: of its device. program: see `program_digest`."""

    rank: int
    suitable_bytes: int
    kind: str
    program: str


class Join(msgspec.Struct, frozen=True, tag="join"):
    """The go-ahead for MLX to connect the ranks: all are here, and alike."""


class Limit(msgspec.Struct, frozen=True, tag="limit"):
    """The settings of each rank's device memory."""

    memory: settings.Memory


class Load(msgspec.Struct, frozen=True, tag="load"):
    """The order to load one's part of `model`."""

    model: settings.Model


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """A rank's success in loading, with the fingerprint of its checkpoint."""

    fingerprint: str


class NotLoaded(msgspec.Struct, frozen=True, tag="not_loaded"):
    """A rank's failure to load."""

    reason: str


class Serve(msgspec.Struct, frozen=True, tag="serve"):
    """The start of plans. stores_prefixes: whether `Stored` follows each prompt's state."""

    stores_prefixes: bool


# ---- a step ------------------------------------------------------------------------------


class Array(msgspec.Struct, frozen=True, array_like=True):
    """The bytes of an array in row-major order; `dtype` is a name of MLX's or numpy's."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Features(msgspec.Struct, frozen=True, array_like=True):
    """The encoder's output for one span: see `ImageFeatures`."""

    rows: Array
    visual_mask: Array | None
    deepstack: Array | None


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """The first `num_tokens` tokens of a stored segment."""

    number: int
    num_tokens: int


class New(msgspec.Struct, frozen=True):
    """A request that a plan starts to prefill; see `NewRequest` and `PreparedPrompt`."""

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
    """The runner's part of a `SchedulerOutput`. dropped: stored segments to free."""

    finished_seqs: tuple[tuple[str, int], ...]
    new: tuple[New, ...]
    decode: tuple[tuple[str, int], ...]
    prefill: Chunk | None
    prefill_with: tuple[Chunk, ...]
    dropped: tuple[int, ...]


class Taken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """Segment `number`, made of tokens `start` to `end` of the prompt being stored."""

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
    """The changes of the prefix cache by storing a prompt or answer."""

    changes: tuple[Taken | Split, ...]


class PlanAhead(msgspec.Struct, frozen=True, tag="plan_ahead"):
    """See `Runner.plan_ahead`."""


class SetLimit(msgspec.Struct, frozen=True, tag="set_limit"):
    """See `DeviceMemory.set_limit`."""

    limit_bytes: int


class Clear(msgspec.Struct, frozen=True, tag="clear"):
    """See `DeviceMemory.clear`. dropped: as in `Plan`, so that their memory is free, too."""

    dropped: tuple[int, ...]


Answer = Hello | Loaded | NotLoaded
Message = Join | Limit | Load | Serve | Plan | Stored | PlanAhead | SetLimit | Clear

encode = msgspec.msgpack.Encoder().encode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
decode_message = msgspec.msgpack.Decoder(Message).decode
