"""Verdicts on settings, and on versions of the code."""
