"""The routes of uploaded files, in OpenAI's and Anthropic's dialects, and of media by hash."""
