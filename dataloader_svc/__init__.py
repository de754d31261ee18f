"""The loader daemon: WebDataset tars in, batches in shared memory out. Imports no torch."""
