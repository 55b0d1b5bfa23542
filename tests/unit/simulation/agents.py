"""Costs and workloads of round numbers, for which results are known exactly."""

from __future__ import annotations

from typing import Any

from scripts.simulation.costs import Costs
from scripts.simulation.workload import Workload

_ROUND: dict[str, Any] = {
    "machine": "none",
    "model": "none",
    "measured": "never",
    "head_tokens": 20,
    "first_text_tokens": 50,
    "turn_text_tokens": 30,
    "kv_bytes_per_token": 8192.0,
    "feature_bytes_per_token": 2048.0,
    "request": (0.005, 0.0, 0.0003),
    "picture": (0.004, 0.0),
    "encode": (0.02, 0.0007, 0.0),
    "prefill": (0.02, 0.0007, 2e-7, 1e-6),
    "join": (0.01, 0.0),
    "merge": 1e-6,
    "tail": 0.003,
    "decode": (0.012, 0.001, 1e-6),
}
_FREE: dict[str, Any] = {
    "request": (0.0, 0.0, 0.0),
    "picture": (0.0, 0.0),
    "encode": (0.0, 0.0, 0.0),
    "prefill": (0.0, 0.0, 0.0, 0.0),
    "join": (0.0, 0.0),
    "merge": 0.0,
    "tail": 0.0,
    "decode": (0.0, 0.0, 0.0),
}


def costs(**given: Any) -> Costs:
    """Costs of a machine on which every phase takes time."""
    return Costs(**(_ROUND | given))


def free(**given: Any) -> Costs:
    """Costs of a machine on which only the given phases take time."""
    return Costs(**(_ROUND | _FREE | given))


def workload(**given: Any) -> Workload:
    return Workload(**({"users": 4, "seconds": 60.0} | given))
