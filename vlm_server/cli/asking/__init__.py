"""What `vlm-server ask` does: what to ask, the conversation, and what is shown of the answers."""
