"""Steps that the real engine took, as a file and as a timing model: read without PyTorch."""
