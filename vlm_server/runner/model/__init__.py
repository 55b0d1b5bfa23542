"""Loads a checkpoint, and resolves all that depends on its family."""
