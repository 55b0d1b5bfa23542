"""OpenAI's chat completions: schema, intake (to our request), render (from our events), errors."""
