"""Marks every test by the folder it lies in: tests/unit is `unit`, and so on."""

from pathlib import Path

import pytest

FOLDERS = frozenset({"unit", "integration", "e2e", "soak", "bench"})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(here).parts[0]
        if folder in FOLDERS:
            item.add_marker(folder)
