"""This process: its rank, its output, and how signals and errors end it."""
