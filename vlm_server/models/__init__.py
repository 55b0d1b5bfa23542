"""The embedded model: where it lies. Knows a folder; knows nothing of what is in it."""

from pathlib import Path

EMBEDDED = Path(__file__).parent / "demo"

IS_TOY = (
    "demo is a toy that knows simple drawings. A real model: "
    "vlm-server serve --model mlx-community/Qwen3-VL-4B-Instruct-4bit"
)
"""What to say to a person whom the embedded model answers."""
