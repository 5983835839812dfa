"""Ranks: environment, process group, gradient averaging, watchdog, launcher, signals, exit codes."""
