"""`vlm-server bench`: compares servers by sending them the same requests."""
