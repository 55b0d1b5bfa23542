"""Models as Ollama's clients name, list and keep them."""
