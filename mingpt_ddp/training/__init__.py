"""One run: assembly, the loop, one step of it, evaluation, and when to save. Read run.py first."""
