"""Ranks: environment, process group, strategies, watchdog, launcher, signals, exit codes."""

from mingpt_ddp.process.env import read_env


def get_rank() -> int:
    """Return the rank of this process among all, from 0; for user code.

    Raises ConfigError as `read_env` does.
    """
    return read_env().rank


def get_local_rank() -> int:
    """Return the rank of this process among those of its machine, from 0."""
    return read_env().local_rank


def get_world_size() -> int:
    """Return the number of processes of the job."""
    return read_env().world_size
