"""What the tests of caches share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Thread switches as often as Python can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)
