"""The train command: start the fork server of local workers, then do everything else."""

import contextlib
import sys
from collections.abc import Callable

from mingpt_ddp.distributed.env import read_env
from mingpt_ddp.distributed.launch.fork_server import server_pid, start_server
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.interrupts import interrupt_commands
from mingpt_ddp.linux import kill
from mingpt_ddp.storage.sockets import delete_socket_directory


def main(to_words: Callable[[list[str]], list[str]] = list) -> None:
    """Run main.py and `python -m mingpt_ddp`; always exit.

    Args:
        to_words: makes the words for Hydra from the command line; its UserError ends the process.
    """
    try:
        if _forks_workers(sys.argv[1:]):
            start_server()  # which imports torch for seconds
            interrupt_commands(_end_server)
        from mingpt_ddp.cli import train_job  # meanwhile, for a quarter of a second
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: {error.name} is not installed here; install mingpt_ddp with pip, or in a "
            "checkout type `make train` once, then `. .venv/bin/activate`"
        )
    train_job.main(to_words)


def _end_server() -> None:
    """End the fork server. It notices the end of this process only after it has imported torch."""
    if pid := server_pid():
        kill(pid)
    delete_socket_directory()


def _forks_workers(words: list[str]) -> bool:
    """Return whether a command line is about to start local workers from a fork server.

    A value that Hydra reads otherwise, or in a preset, starts it later, or in vain.
    """
    typed = dict(word.partition("=")[::2] for word in words)
    has_workers = typed.get("ddp.nproc_per_node", "0") != "0"
    has_parallel_jobs = typed.get("sweep.parallel", "1") != "1"
    if not (has_workers or has_parallel_jobs) or typed.get("ddp.launcher") == "spawn":
        return False
    with contextlib.suppress(ConfigError):  # reported later
        return read_env().is_standalone
    return False
