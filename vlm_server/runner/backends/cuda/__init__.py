"""The backend of CUDA: kernels of our own, and attention by cuDNN in few shapes."""
