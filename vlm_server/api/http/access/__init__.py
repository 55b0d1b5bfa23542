"""Access checks: a request's Host and Origin, its API key, and the key's rights."""
