"""Parameters and examples: a few in the default run, all in `scripts/test --all`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import hypothesis
import pytest

_EXAMPLES = 100
_SHARE_BY_DEFAULT = 0.25

_share = 1.0


def few_of(values: Iterable[Any], few: Collection[Any]) -> list[Any]:
    """`values` for `parametrize`, of which the default run takes `few`.

    A tuple is the values of several arguments.
    """
    return [value if value in few else _only_whole(value) for value in values]


def examples(count: int) -> int:
    """The number of examples of a property: `count` in the whole run, else a quarter of it.

    For `hypothesis.settings` of a property that is not content with 100.
    """
    return round(count * _share)


def draw_examples(*, is_whole: bool) -> None:
    """To be called before modules of tests are imported.

    Properties are tried without a time limit: a machine with much else to do would break it.
    """
    global _share
    _share = 1.0 if is_whole else _SHARE_BY_DEFAULT
    hypothesis.settings.register_profile(
        "tests",
        deadline=None,
        max_examples=examples(_EXAMPLES),
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("tests")


def _only_whole(value: Any) -> Any:
    arguments = value if isinstance(value, tuple) else (value,)
    return pytest.param(*arguments, marks=pytest.mark.whole)
