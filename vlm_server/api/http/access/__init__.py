"""Who may ask: the checks of a request's headers, API keys, and what follows from a key."""
