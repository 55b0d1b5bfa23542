"""`vlm-server top`: what a daemon is doing, from second to second."""
