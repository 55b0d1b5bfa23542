"""Modules that replace or drive mlx-vlm's: compiled steps, attention, towers, tiles, fixes."""
