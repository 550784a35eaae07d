"""What CUDA does differently from the CPU that the fake tensors are on."""
