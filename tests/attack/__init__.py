"""Attacks on a real daemon: which are accepted, which requests suffer, and what remains afterwards."""
