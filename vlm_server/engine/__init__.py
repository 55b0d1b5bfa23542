"""The engine process: its start and channel, and what it does: requests, their scheduling, memory.

Only `start` imports `runner`, and so mlx; all other modules use the protocols of `interfaces`.
"""
