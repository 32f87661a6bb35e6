"""Triton kernels of the CUDA backend, one idea a file. Each launcher takes and returns torch tensors."""
