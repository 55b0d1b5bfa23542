"""Anthropic's messages: schema, intake (to our request), render (from our events), errors."""
