"""What is only for CUDA: kernels of our own, and attention by cuDNN in few shapes."""
