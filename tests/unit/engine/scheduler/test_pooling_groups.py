"""Vectors are cut and compared as retrieval does it."""

from __future__ import annotations

import numpy as np
import pytest

from vlm_server.engine.scheduler.pooling_groups import cut, similarity

ROWS = np.array([[0.6, 0.8, 0.0], [0.0, 0.0, 1.0]], dtype=np.float32)


def test_cut_vectors_are_normalized_again() -> None:
    np.testing.assert_allclose(cut(ROWS[:1] * 3, 2), [[0.6, 0.8]], rtol=1e-6)
    assert cut(ROWS, 2).dtype == np.float32


@pytest.mark.parametrize("dimensions", [None, 3])
def test_whole_vectors_stay_as_they_are(dimensions: int | None) -> None:
    assert cut(ROWS, dimensions) is ROWS


def test_cut_of_zeros_stays_finite() -> None:
    assert np.array_equal(cut(ROWS[1:], 2), [[0.0, 0.0]])


def test_similarity_of_single_vectors_is_their_cosine() -> None:
    assert similarity(ROWS[:1], ROWS[:1]) == pytest.approx(1.0)
    assert similarity(ROWS[:1], ROWS[1:]) == 0.0


def test_similarity_of_several_sums_best_matches_of_query() -> None:
    document = np.array([[1, 0, 0], [0, 1, 0]], dtype=np.float32)
    assert similarity(ROWS, document) == pytest.approx(0.8)
    assert similarity(document, ROWS) == pytest.approx(0.6 + 0.8)
