"""The models that are served: load, unload, and share device memory."""
