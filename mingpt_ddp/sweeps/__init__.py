"""Hydra multirun: pre-flight, job directories, search, and the report of what came out."""
