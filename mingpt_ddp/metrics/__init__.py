"""Measure training, and log it to the console, metrics.jsonl and trackers."""
