"""Formats of settings files: a value is put or dropped, and all other text stays as it is."""
