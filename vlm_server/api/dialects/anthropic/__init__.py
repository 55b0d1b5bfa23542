"""Anthropic's messages: schema, parse (to our request), render (from our events), errors."""
