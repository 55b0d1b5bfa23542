"""Starts, watches, restarts and drains the engine process."""
