"""A small trained model's checkpoint; tests that ask for it are skipped where it can't be had."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from scripts import trained_model


def trained_checkpoint(*, has_vision: bool = False) -> Path:
    """A read-only folder: see `scripts/trained_model`. Downloads 93 MB once for a user."""
    checkpoint = _checkpoint_or_reason(has_vision)
    if isinstance(checkpoint, str):
        pytest.skip(checkpoint)
    return checkpoint


@cache
def _checkpoint_or_reason(has_vision: bool) -> Path | str:
    """The folder, or why there is none: one attempt is enough for all tests."""
    try:
        return trained_model.cached(has_vision=has_vision)
    except trained_model.Unavailable as error:
        return str(error)
