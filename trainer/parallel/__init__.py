"""What turns the one-device model into one rank's share of it. Without this package one process still trains."""
