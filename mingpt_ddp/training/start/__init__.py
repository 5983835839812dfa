"""The start of a run: its stages, the checks before anything is written, and its log lines."""
