"""`vlm-server completions`: what shells need to complete the command line."""
