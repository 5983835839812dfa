"""Calls of the user's hooks, and the commands at the end of a run."""
