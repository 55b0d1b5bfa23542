"""OpenAI's Responses: schema, parse (to our request), render (from our events), store."""
