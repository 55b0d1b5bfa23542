"""Prefixes and encoder outputs on disk, from and to device arrays."""
