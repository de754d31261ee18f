"""What keeps less on the device: recomputation."""
