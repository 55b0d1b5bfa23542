"""The families of mlx-vlm: the table of them, their corrections, and those that are refused."""
