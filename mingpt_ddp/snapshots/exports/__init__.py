"""Exports of a snapshot, in the own format and for transformers."""
