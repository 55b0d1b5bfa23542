"""`vlm-server doctor`: checks of all that the daemon depends on, with advice for each problem."""
