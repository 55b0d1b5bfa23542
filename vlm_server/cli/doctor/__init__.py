"""`vlm-server doctor`: looks at everything that the daemon depends on, and says what to do."""
