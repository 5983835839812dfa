"""Find, check and read snapshots, and other weights."""
