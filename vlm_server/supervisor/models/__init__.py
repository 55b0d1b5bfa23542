"""Which models are loaded, and what each may take of the memory."""
