"""Compare settings, or versions of the code, and word the verdicts."""
