"""Server-sent events: written, kept alive, and kept for clients that resume them."""
