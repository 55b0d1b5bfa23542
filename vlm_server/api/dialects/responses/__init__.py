"""OpenAI's Responses: schema, intake (to our request), render (from our events), store."""
