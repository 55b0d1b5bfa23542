"""How memory is shared between models."""

from __future__ import annotations

from vlm_server.settings import MIB
from vlm_server.supervisor.models.memory_shares import divide, needed_bytes


def test_model_needs_bytes_for_weights_and_requests() -> None:
    assert needed_bytes(800 * MIB, None) == (800 + 256) * MIB
    assert needed_bytes(8000 * MIB, None) == 9000 * MIB
    assert needed_bytes(8000 * MIB, 5) == 8000 * MIB + 5


def test_remaining_memory_is_shared_equally() -> None:
    assert divide({"a": 10, "b": 20}, 40) == {"a": 15, "b": 25}


def test_memory_shares_never_exceed_limit() -> None:
    """Engines may hold more than was examined."""
    shares = divide({"a": 10, "b": 20, "c": 20}, 40)
    assert sum(shares.values()) <= 40
    assert min(shares.values()) > 0
