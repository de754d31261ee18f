"""What the loader daemon and the trainer agree on. Imports neither of them."""
