"""The engine process: its start and channel, and what it does: requests, their scheduling, memory.

No mlx: `start` wires `runner` in, and what is below it knows interfaces alone.
"""
