"""Takes the names that transformers 4.52 and later gives weights, where mlx-vlm does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mlx_vlm.utils import get_model_and_args


@contextmanager
def taken(config: dict[str, Any], prefixes: Mapping[str, str]) -> Iterator[None]:
    """While this lasts, mlx-vlm's model of `config` is handed its weights under its own names.

    mlx-vlm has no place for this but the model's own `sanitize`, so that is replaced meanwhile, for
    loads of this thread. Without `prefixes` nothing is.
    """
    if not prefixes:
        yield
        return
    model: Any = get_model_and_args(config)[0].Model
    own = model.__dict__.get("sanitize")
    inner = getattr(model, "sanitize", None)

    def sanitize(self: Any, weights: Mapping[str, Any]) -> Any:
        renamed = {_renamed(name, prefixes): array for name, array in weights.items()}
        return inner(self, renamed) if inner else renamed

    model.sanitize = sanitize
    try:
        yield
    finally:
        if own is None:
            del model.sanitize
        else:
            model.sanitize = own


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    found = next((old for old in prefixes if name.startswith(old)), None)
    return name if found is None else prefixes[found] + name[len(found) :]
