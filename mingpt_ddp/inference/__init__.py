"""Generation of text from a trained model."""
