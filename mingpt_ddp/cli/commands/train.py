"""The train command.

To save time, it first starts the fork server: a process that imports torch, and then forks the
local workers.
"""

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
    """Run main.py and `python -m mingpt_ddp`. Always exit the process.

    Args:
        to_words: Turns the arguments of the command into the words that Hydra reads. The process
            ends if this raises a UserError.
    """
    try:
        if _forks_workers(sys.argv[1:]):
            start_server()  # another process, which now imports torch for some seconds
            interrupt_commands(_end_server)
        # This import takes a quarter of a second, while the server starts.
        from mingpt_ddp.cli import train_job
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: the package {error.name} is not installed here; install mingpt_ddp with pip, "
            "or in a checkout run `make train` once, then `. .venv/bin/activate`"
        )
    train_job.main(to_words)


def _forks_workers(words: list[str]) -> bool:
    """Guess from the words alone if this command will start local workers from a fork server.

    If a preset asks for workers, the server starts later. If Hydra reads a value differently, the
    server may start without being needed.
    """
    values = dict(word.partition("=")[::2] for word in words)
    has_workers = values.get("ddp.nproc_per_node", "0") != "0"
    has_parallel_jobs = values.get("sweep.parallel", "1") != "1"
    if not (has_workers or has_parallel_jobs) or values.get("ddp.launcher") == "spawn":
        return False
    with contextlib.suppress(ConfigError):  # train_job reports this error
        return read_env().is_standalone
    return False


def _end_server() -> None:
    """End the fork server. It notices the end of this process only after it has imported torch."""
    if pid := server_pid():
        kill(pid)
    delete_socket_directory()
