"""Device memory: the admission of requests, estimates of their peaks, and when memory is freed."""
