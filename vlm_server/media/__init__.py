"""What a client sends as a picture, made into checked bytes. Knows no model and no HTTP."""
