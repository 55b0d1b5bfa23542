"""Holds answers to JSON schemas and tool calls, in processes that end with them: see `process`."""
