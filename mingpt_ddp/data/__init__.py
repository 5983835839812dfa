"""Text to tokens to batches, and keyed randomness."""
