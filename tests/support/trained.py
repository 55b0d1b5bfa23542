"""A small trained model's checkpoint; tests that ask for it are skipped where it can't be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import trained_model


def trained_checkpoint(*, has_vision: bool = False) -> Path:
    """A read-only folder: see `scripts/trained_model`. Downloads 93 MB once for a user."""
    try:
        return trained_model.cached(has_vision=has_vision)
    except trained_model.Unavailable as error:
        pytest.skip(str(error))
