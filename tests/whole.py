"""Values of which the default run tries a few, and the whole run (`scripts/test --all`) all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few_of(values: Iterable[Any], few: Collection[Any]) -> list[Any]:
    """`values` for `parametrize`; a tuple is the values of several arguments."""
    return [value if value in few else _only_whole(value) for value in values]


def _only_whole(value: Any) -> Any:
    arguments = value if isinstance(value, tuple) else (value,)
    return pytest.param(*arguments, marks=pytest.mark.whole)
