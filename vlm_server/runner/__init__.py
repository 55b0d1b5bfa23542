"""Mechanism: load, encode, prefill, decode, sample. Knows no policy.

The only package that imports mlx and mlx-vlm. What crosses between its threads is numpy arrays,
ints, and an image's features, which the encoder's thread has evaluated: a lazy `mx.array` can
be evaluated only on the thread that built it.
"""
