"""`vlm-server bench`: one client asks several servers the same. Knows HTTP and pictures; no mlx."""
