"""The trainer, and the loader client that any PyTorch program can use alone."""
