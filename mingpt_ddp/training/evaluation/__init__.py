"""The evaluation of a model, and the average of its weights."""
