"""Sweeps (Hydra's multirun): check the jobs, run them, and search for good settings."""
