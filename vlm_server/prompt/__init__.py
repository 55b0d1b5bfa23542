"""The host side, no mlx: a request to token ids, media spans and pixels. See `preparer`."""
