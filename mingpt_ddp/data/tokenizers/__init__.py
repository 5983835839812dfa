"""Tokenize by characters, by bytes, or by byte-pair encoding (BPE)."""
