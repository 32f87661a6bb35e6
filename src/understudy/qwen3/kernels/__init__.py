"""Triton kernels of the CUDA backend, one idea per file. Each launcher takes and returns torch tensors."""
