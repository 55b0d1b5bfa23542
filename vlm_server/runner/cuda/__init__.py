"""Kernels of our own for CUDA, and how they are called."""
