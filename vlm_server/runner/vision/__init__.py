"""The vision encoder: pixels to features."""
