"""The evaluation of a model, what follows it, and the average of the weights."""
