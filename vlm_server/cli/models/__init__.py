"""`vlm-server models` and `vlm-server pull`: the checkpoints of this machine."""
