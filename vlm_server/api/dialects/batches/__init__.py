"""The routes of batches, in OpenAI's dialect."""
