"""Marks every test by the folder it lies in: tests/unit is `unit`, and so on.

Those that start the real program stay on one worker, which has the daemons that they share.

Properties are tried without a time limit: a machine with much else to do would break it.
"""

from pathlib import Path

import hypothesis
import pytest

FOLDERS = frozenset(
    {"unit", "integration", "e2e", "docs", "browser", "clients", "attack", "soak", "bench"}
)

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
        folder = item.path.relative_to(here).parts[0]
        if folder in FOLDERS:
            item.add_marker(folder)
        if folder in FOLDERS - {"unit", "integration"}:
            item.add_marker(pytest.mark.xdist_group("daemons"))
