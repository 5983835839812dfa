"""Train on several ranks: process group, strategies, devices, watchdog and launcher.

The functions of this module are for user code.
"""

from mingpt_ddp.process.env import read_env


def get_rank() -> int:
    """Return the rank of this process among all processes of the job, counted from 0.

    Raises:
        ConfigError: An environment variable such as RANK is missing or inconsistent.
    """
    return read_env().rank


def get_local_rank() -> int:
    """Return the rank of this process among the processes of its machine, counted from 0."""
    return read_env().local_rank


def get_world_size() -> int:
    """Return the number of processes of the job."""
    return read_env().world_size
