"""What a client sends as picture or video, made into checked bytes. Knows no model, no HTTP."""
