"""The files of a checkpoint: what they must hold, how they are read, what they will take."""
