"""Modules that replace or drive mlx-vlm's language models: compiled steps, attention."""
