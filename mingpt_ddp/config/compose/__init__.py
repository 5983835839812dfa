"""Hydra: composing a configuration, and its errors as one line."""
