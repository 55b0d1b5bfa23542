"""Vectors of inputs for clients, and the similarity of two inputs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]
"""(vectors, dimensions): one vector, or one for each token of an input."""

_MIN_NORM = 1e-9


def cut(rows: Rows, dimensions: int | None) -> Rows:
    """The first `dimensions` numbers of each vector, normalized again; None or all: unchanged."""
    if dimensions is None or dimensions == rows.shape[1]:
        return rows
    parts = rows[:, :dimensions]
    norms = np.linalg.norm(parts, axis=1, keepdims=True)
    cut_rows: Rows = parts / np.maximum(norms, np.float32(_MIN_NORM))
    return cut_rows


def similarity(query: Rows, document: Rows) -> float:
    """The sum over the query's vectors of their largest product with one of the document's.

    For one normalized vector each it is their cosine; for several, MaxSim (Khattab and Zaharia,
    2020).
    """
    products = query.astype(np.float64) @ document.astype(np.float64).T
    return float(products.max(axis=1).sum())
