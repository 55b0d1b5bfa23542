"""Images and videos of a request: decoded in processes that can be killed, and processed."""
