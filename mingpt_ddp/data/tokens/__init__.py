"""Read files of token ids."""
