"""End this process when its parent dies, and kill stopped processes that an agent waits for."""

import multiprocessing
import os
import sys
import threading
import time

from mingpt_ddp.process import linux
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.process.exit import FAILURE, exit_process


def die_with_parent(expected: int | None = None) -> None:
    """Exit when the parent process dies.

    An orphaned worker must not train concurrently with its successor.

    Args:
        expected: Process id of the parent. None for the current parent.
    """
    parent = expected or os.getppid()

    def wait_for_parent() -> None:
        launcher = multiprocessing.parent_process()
        if launcher is not None:
            launcher.join()  # for a forked worker, whose parent is the fork server
        else:
            while os.getppid() == parent:
                time.sleep(0.2)
        exit_process(None, FAILURE)

    if sys.platform == "linux":
        linux.die_with_parent()
        if os.getppid() != parent:  # the parent has died before the call
            exit_process(None, FAILURE)
    if sys.platform != "linux" or multiprocessing.parent_process() is not None:
        threading.Thread(target=wait_for_parent, name="parent-watch", daemon=True).start()


def kill_stopped_siblings(env: DistEnv) -> None:
    """Send SIGKILL to stopped processes of the same agent.

    The agent would send SIGTERM and wait for them, but a stopped process does not react to it. The
    launcher of `ddp.nproc_per_node` kills its stopped workers itself.
    """
    if env.has_agent and multiprocessing.parent_process() is None:
        linux.kill_stopped_children(os.getppid())
