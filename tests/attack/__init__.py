"""Attacks on the real running daemon: what it takes, who pays, and what is left."""
