"""Decodes and checks the images and videos that a client sends, by their headers alone."""
