"""Starts, watches, restarts and drains the engine process. Knows no HTTP and no mlx."""
