"""`vlm-server ask`: questions about images and videos, answered on the terminal."""
