"""Exports of a snapshot, in this package's format and for transformers."""
