"""Policy: who runs next, when an answer ends, what text it is. Knows no mlx and no HTTP."""
