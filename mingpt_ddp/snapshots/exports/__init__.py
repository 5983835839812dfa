"""Export the model in a snapshot, in this package's format or for the transformers library."""
