"""The embedded model: where it lies. Knows a folder; knows nothing of what is in it."""

from pathlib import Path

EMBEDDED = Path(__file__).parent / "demo"
