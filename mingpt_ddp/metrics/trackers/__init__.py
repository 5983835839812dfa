"""Sinks outside of the run directory: Weights & Biases, MLflow, Trackio."""
