"""Holds answers to JSON schemas, in processes that end with them: see `process`."""
