"""The vision encoder: pixels to features, on a thread and an MLX stream of its own."""
