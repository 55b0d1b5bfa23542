"""Checkpoints on disk and on the hub: their names, where they lie, how they get here. No mlx."""
