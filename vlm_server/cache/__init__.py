"""Caches bounded in bytes, in memory and on disk, generic in what they store. See `caches`."""
