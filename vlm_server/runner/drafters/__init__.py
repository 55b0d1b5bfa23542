"""Trained drafters, which guess the tokens after the newest one."""
