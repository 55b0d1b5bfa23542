"""`vlm-server connect`: settings of other programs, changed so that they use a running daemon."""
