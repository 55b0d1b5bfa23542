"""Makes token ids, media spans and pixels of a request, without mlx. See `preparer`."""
