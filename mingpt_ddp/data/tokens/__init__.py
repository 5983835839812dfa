"""Files of token ids."""
