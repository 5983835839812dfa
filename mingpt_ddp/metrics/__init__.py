"""Metrics of training, and their sinks: console, TensorBoard, JSON lines."""
