"""Corrections of mlx-vlm's models and processors of single families, made at load."""
