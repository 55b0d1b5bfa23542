"""The device that MLX runs on: its kind and size, its arrays, its speed."""
