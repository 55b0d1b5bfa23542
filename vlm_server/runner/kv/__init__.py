"""KV caches: of the running batch, as cached segments, as records of the disk cache."""
