"""Units and bounds of settings."""

from __future__ import annotations

MIB = 1 << 20
MIN_KEY_CHARS = 8
MAX_FLOAT = 1e9
MAX_INT = 1 << 53
"""Of any setting: far above what makes sense, and below what overflows."""
