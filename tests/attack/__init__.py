"""Attacks on a real daemon: what is accepted, who pays, and what remains."""
