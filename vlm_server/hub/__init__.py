"""Checkpoints on disk and on the hub: names, look-up, downloads. No mlx."""
