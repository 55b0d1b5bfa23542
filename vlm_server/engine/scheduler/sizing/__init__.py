"""Sizes of device calls (tokens, images, prompts), learned from measured times.

All sizes are powers of two, since some backends compile for each new shape. The width of drafts is
chosen by the runner as it launches a step (`runner/decode/speculation`): gains of a few percent
show in running means, not in the best of a few times.
"""
