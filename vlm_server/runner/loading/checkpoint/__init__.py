"""The files of a checkpoint: checks, configuration, renamed weights, memory."""
