"""Decodes videos to sampled frames, in a process that can be killed."""
