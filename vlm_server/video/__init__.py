"""Encoded videos to sampled frames, in a process that can be killed. Knows PyAV; knows no model."""
