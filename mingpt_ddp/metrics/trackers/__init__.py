"""Sinks outside of the run directory's own logs: metrics.csv, Weights & Biases, MLflow, Trackio."""
