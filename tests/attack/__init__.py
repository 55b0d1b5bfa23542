"""Attacks on a real daemon: what is accepted, which requests suffer, and what remains."""
