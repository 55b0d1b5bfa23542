"""Marks every test by the folder it lies in: tests/unit is `unit`, and so on.

Tests of one module that start daemons run in one worker: it starts what they share once.

What is marked `alone` measures: nothing else runs meanwhile.

Properties are tried without a time limit: a machine with much else to do would break it.
"""

import gc
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

from tests.turns import turn

FOLDERS = frozenset(
    {"unit", "integration", "e2e", "docs", "browser", "clients", "attack", "scale", "soak", "bench"}
)

STARTING = frozenset({"e2e", "browser", "clients", "attack"})
"""Folders whose modules start daemons."""

hypothesis.settings.register_profile(
    "no clock", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("no clock")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-browser",
        action="store_true",
        help="fail tests/browser where there is no Chromium, instead of skipping it",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        path = item.path.relative_to(here)
        folder = path.parts[0]
        if folder in FOLDERS:
            item.add_marker(folder)
        if folder in STARTING:
            item.add_marker(pytest.mark.xdist_group(str(path.with_suffix(""))))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of items live until the end: no collection of garbage need go through them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return (yield)
    folder = Path(tempfile.gettempdir(), f"vlm-server-tests-{run}")
    folder.mkdir(exist_ok=True)
    with turn(folder, alone=item.get_closest_marker("alone") is not None):
        return (yield)
