"""What is ours on one kind of device: attention, kernels, arrangements of rows."""
