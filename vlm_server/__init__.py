"""A vision-language serving daemon for a person's own machine, on MLX and mlx-vlm."""

__version__ = "0.1.0"
