"""`https:` and `file:` URLs of images and videos, read where the settings allow it."""
