"""Convert models and tokenizers to files of the transformers library, and back."""
