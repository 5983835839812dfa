"""The start of a run: its stages, the checks before anything is written, the log lines."""
