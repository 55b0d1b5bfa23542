"""The HTTP front: OpenAI's shapes, limits, streams. Knows starlette; knows no mlx."""
