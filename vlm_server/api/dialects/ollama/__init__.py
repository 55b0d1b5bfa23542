"""Ollama's API: chat, generate, and what its clients ask about the model."""
