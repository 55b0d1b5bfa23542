"""Corrections of mlx-vlm's models and processors of single families, made at load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Settings = Mapping[str, Any]
"""The checkpoint's preprocessor_config.json."""
Fix = Callable[[Any, Any, Settings], None]
"""(model, processor, settings): changes a loaded model, its processor, or both."""


def override(target: Any, **methods: Any) -> None:
    """Give `target` alone other methods (`name=function`) than its class has; these are the same
    class's to all that look for its name or its module."""
    kind = type(target)
    namespace = {"__module__": kind.__module__, **methods}
    target.__class__ = type(kind.__name__, (kind,), namespace)
