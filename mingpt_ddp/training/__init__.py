"""One run: how it starts, its training loop, its evaluations and its snapshots.

Read run.py first.
"""
