"""Tokenizers: characters, bytes, BPE."""
