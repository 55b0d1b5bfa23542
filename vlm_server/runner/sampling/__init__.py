"""Logits to tokens and their log probabilities."""
