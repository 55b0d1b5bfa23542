"""Mechanism: load, prepare, encode, prefill, decode, sample. Knows no policy.

The only room that imports mlx and mlx-vlm. Every `mx.array` lives on one thread, the
inference thread; what crosses to it or from it is numpy arrays and ints.
"""
