"""The page at `/`, for people: static files, and nothing that is not in `static/`."""
