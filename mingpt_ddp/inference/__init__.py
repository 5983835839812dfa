"""Generate text from a model."""
