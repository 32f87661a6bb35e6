"""Recorded steps of the real engine, as a file and as a timing model; needs no PyTorch."""
