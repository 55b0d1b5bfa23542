"""Grammars of JSON schemas and tool calls, compiled and followed in child processes: `process`."""
