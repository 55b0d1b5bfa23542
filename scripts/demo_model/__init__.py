"""Draws the scenes, writes the questions, and trains the embedded vision-language model.

Nothing in `vlm_server` imports this package; PyTorch is a dependency of it alone.
"""
