"""Requests that crashed engines: what they have in common, and what is refused for it."""
