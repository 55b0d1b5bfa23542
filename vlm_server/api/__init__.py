"""The HTTP server: dialects, operations endpoints, and what they share."""
