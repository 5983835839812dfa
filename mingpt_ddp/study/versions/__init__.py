"""Comparison of versions of the code."""
