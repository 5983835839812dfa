"""The train command: start the fork server of local workers, then do everything else."""

import contextlib
import sys
from collections.abc import Callable

from mingpt_ddp.distributed.launch.fork_server import server_pid, start_server
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.process.env import read_env
from mingpt_ddp.process.interrupts import interrupt_commands
from mingpt_ddp.process.linux import kill
from mingpt_ddp.process.sockets import delete_socket_directory


def main(to_words: Callable[[list[str]], list[str]] = list) -> None:
    """Run main.py and `python -m mingpt_ddp`; always exit.

    Args:
        to_words: Turns the arguments of the command into the words that Hydra reads. If it raises a
            UserError, the process ends.
    """
    try:
        if _forks_workers(sys.argv[1:]):
            start_server()  # in another process, which imports torch for some seconds
            interrupt_commands(_end_server)
        from mingpt_ddp.cli import train_job  # takes a quarter of a second meanwhile
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: {error.name} is not installed here; install mingpt_ddp with pip, or in a "
            "checkout type `make train` once, then `. .venv/bin/activate`"
        )
    train_job.main(to_words)


def _forks_workers(words: list[str]) -> bool:
    """Guess from the words alone if this command will start local workers from a fork server.

    If a preset asks for workers, the server starts later. If Hydra reads a value differently, the
    server may start in vain.
    """
    typed = dict(word.partition("=")[::2] for word in words)
    has_workers = typed.get("ddp.nproc_per_node", "0") != "0"
    has_parallel_jobs = typed.get("sweep.parallel", "1") != "1"
    if not (has_workers or has_parallel_jobs) or typed.get("ddp.launcher") == "spawn":
        return False
    with contextlib.suppress(ConfigError):  # train_job reports it
        return read_env().is_standalone
    return False


def _end_server() -> None:
    """End the fork server. It notices the end of this process only after it has imported torch."""
    if pid := server_pid():
        kill(pid)
    delete_socket_directory()
