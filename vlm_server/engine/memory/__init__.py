"""Device memory: who is admitted, what is freed when, and what work needs."""
