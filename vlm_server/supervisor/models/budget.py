"""How the device's memory is shared between the models that are loaded. Sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping

from vlm_server.errors import ModelDoesNotFit
from vlm_server.settings import MIB

_LEAST_ROOM_BYTES = 256 * MIB
_ROOM_FRACTION = 1 / 8
_GIB = 1 << 30


def needed_bytes(weight_bytes: int, room_bytes: int, least_kv_bytes: int = 0) -> int:
    """The least that a model may have: its weights, and room for requests.

    `room_bytes` is `memory.model_room_bytes`; `least_kv_bytes` takes the shortest request for which
    its engine must have room, or it ends: twice that, for what computing it takes.
    """
    room = room_bytes or max(_LEAST_ROOM_BYTES, int(weight_bytes * _ROOM_FRACTION))
    return weight_bytes + max(room, 2 * least_kv_bytes)


def shares(needed: Mapping[str, int], limit_bytes: int) -> dict[str, int]:
    """What each model may have: as much as it needs, and an equal part of what is left.

    If less is there than they need, as they have come to know, each has that much less room.
    """
    rest = limit_bytes - sum(needed.values())
    return {name: num_bytes + rest // len(needed) for name, num_bytes in needed.items()}


def check(name: str, needed: int, staying: Mapping[str, int], limit_bytes: int) -> None:
    """Raises ModelDoesNotFit if there is no memory for `name` even with all others unloaded that
    may be: those `staying` may not."""
    held = sum(staying.values())
    if needed + held <= limit_bytes:
        return
    others = f", and {', '.join(staying)} keep {held / _GIB:.2f} GiB of it" if staying else ""
    raise ModelDoesNotFit(
        f"The model `{name}` needs {needed / _GIB:.2f} GiB of device memory, with room for "
        f"requests; the limit is {limit_bytes / _GIB:.2f} GiB{others}."
    )
