"""API keys in what is shown, masked: ours, and those that a settings file holds already."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

_SECRET_NAME = re.compile(r"key|token|secret|passw|auth|credential|header|cookie", re.IGNORECASE)
_REFERENCE = re.compile(r"[A-Z][A-Z0-9_]*|\$?\{.*\}|\$\w+|.{0,7}|\d+", re.DOTALL)
"""Names of environment variables, references to them, and what is too short to be a key."""
_LONG = 16
_WRITTEN = re.compile(
    r"""((?:key|token|secret|password|authorization|credentials?|cookie)["']?\s*[:=]\s*["']?"""
    r"""(?:Bearer )?)([^\s"',;]+)""",
    re.IGNORECASE,
)
"""A secret after its name, in a comment too."""
_LOGIN = re.compile(r"(://[^\s/:@]*:)[^\s/@]+(?=@)")
"""A password in a URL."""


def masked_key(key: str) -> str:
    """The beginning of a long key; nothing of a short one."""
    return f"{key[:4]}…" if len(key) >= _LONG else "…"


def masked(text: str, trees: Iterable[Any], key: str | None) -> str:
    """`text` without `key`, and without the secrets of the parsed settings `trees`."""
    secrets = {secret for tree in trees for secret in _secrets(tree, False)}
    for secret in sorted({*secrets, *([key] if key else [])}, key=len, reverse=True):
        for written in (json.dumps(secret)[1:-1], secret):
            text = text.replace(written, masked_key(secret))
    text = _LOGIN.sub(r"\1…", text)
    return _WRITTEN.sub(
        lambda m: m[0] if _REFERENCE.fullmatch(m[2]) else m[1] + masked_key(m[2]), text
    )


def _secrets(tree: Any, is_secret: bool) -> Iterator[str]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from _secrets(value, is_secret or bool(_SECRET_NAME.search(str(name))))
    elif isinstance(tree, list):
        for value in tree:
            yield from _secrets(value, is_secret)
    elif is_secret and isinstance(tree, str) and not _REFERENCE.fullmatch(tree):
        yield tree
