"""Policy, no mlx: `loop` is the beat; requests, their scheduling, and device memory."""
