"""Objects older than a module's tests are frozen, and skipped by garbage collections in them.

Some of what is tested collects garbage; after thousands of tests each time would take a second.
"""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def _few_objects() -> None:
    gc.collect()
    gc.freeze()
