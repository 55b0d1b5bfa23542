"""The HTTP layer that all dialects share; knows no dialect."""
