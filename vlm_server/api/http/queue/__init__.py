"""Who may begin: queue slots, and the gaps between requests."""
