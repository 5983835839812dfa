"""Hydra multirun: pre-flight, job directories, search, and the report of the results."""
