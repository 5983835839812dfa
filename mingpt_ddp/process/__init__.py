"""This process: its ranks, what it prints, how signals and errors end it."""
