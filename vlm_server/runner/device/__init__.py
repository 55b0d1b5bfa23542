"""The device that MLX runs on: its kind, its memory, its speed."""
