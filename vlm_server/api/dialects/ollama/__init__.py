"""Ollama's API: chat, generate, and the endpoints about models."""
