"""Drafts of what sequences will say: guessed, weighed, and verified by wide decode steps."""
