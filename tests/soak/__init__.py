"""`scripts/soak`: minutes of everything that clients do, and what memory does meanwhile. No mlx."""
