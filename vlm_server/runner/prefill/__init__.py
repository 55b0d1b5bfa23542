"""Prompts into KV caches: chunk by chunk, or several short ones in one call."""
