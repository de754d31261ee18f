"""The loader beside raw DALI and torch's DataLoader on one GPU, and beside a training: see `bench.py`."""
