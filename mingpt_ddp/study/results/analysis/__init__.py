"""Compare settings (configurations that differ in more than the seed), or versions of the code."""
