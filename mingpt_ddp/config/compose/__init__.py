"""Compose a configuration with Hydra, and explain Hydra's errors in one line."""
