"""Models and tokenizers in the form of the transformers library, there and back."""
