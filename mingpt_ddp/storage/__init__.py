"""Files by name on any fsspec URL, atomic writes, deadlines; the run directory."""
