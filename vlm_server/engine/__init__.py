"""Policy, no mlx: `loop` runs step after step; requests, their scheduling, device memory."""
