"""Compute the statistics of a report."""
