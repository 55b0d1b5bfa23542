"""Reads `https:` and `file:` URLs of images and videos, where the settings allow it."""
