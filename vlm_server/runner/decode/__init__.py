"""Sequences that decode: their batches, grammars in the background, and speculation."""
