"""Text: where it is, its records, and its encoding into tokens, once per machine."""
