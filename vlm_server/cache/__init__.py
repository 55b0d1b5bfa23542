"""Caches bounded in bytes, pure and generic. Know keys, sizes and pins; know no mlx, no HTTP."""
