"""examples/noise_scale.py: hooks that measure the gradients of each micro-batch."""
