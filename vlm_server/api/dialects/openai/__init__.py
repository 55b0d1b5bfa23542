"""OpenAI's chat and text completions: schema, parse (to our request), render (from our events)."""
