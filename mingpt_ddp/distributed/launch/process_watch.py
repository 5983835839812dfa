"""Kill workers that are stopped, or that do not end after a signal."""

import logging
import os
import threading
import time
from multiprocessing.process import BaseProcess

from mingpt_ddp.distributed.launch.fork_server import server_pid
from mingpt_ddp.distributed.launch.workers import SignalForwarder
from mingpt_ddp.process.linux import STOPPED, kill, read_state

log = logging.getLogger(__name__)

POLL_S = 0.5
# Wait this much longer than ddp.timeout_s, so that the ranks can first name the stopped one.
MARGIN_S = 3.0


class ProcessWatch:
    """A thread of the launcher that kills workers.

    It is a thread, because the main thread may be blocked while it waits for workers. Stopped
    workers are killed, because a stopped process only reacts to SIGKILL.
    """

    def __init__(self, forwarder: SignalForwarder, timeout_s: float, grace_s: float) -> None:
        """
        Args:
            timeout_s: ddp.timeout_s.
            grace_s: Seconds for which processes may go on after a signal.
        """
        self.forwarder = forwarder
        self.limit_s = timeout_s + MARGIN_S
        self.grace_s = grace_s
        self.workers: list[BaseProcess] = []  # workers that run or are about to start
        self._stopped_s: dict[int, float] = {}  # time since each process stopped, by id
        self._done = threading.Event()

    def __enter__(self) -> "ProcessWatch":
        threading.Thread(target=self._run, name="process watch", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._done.wait(POLL_S):
            now = time.monotonic()
            elapsed_s = min(now - before, 2 * POLL_S)  # this process may have been stopped too
            before = now
            is_late = now > self.forwarder.kill_at(self.grace_s)
            server = server_pid()
            for worker in self.workers:
                state = read_state(worker.pid, {os.getpid(), server})
                if worker.pid and state:
                    self._check(worker.pid, worker.name, state, elapsed_s, is_late)
            # A stopped fork server cannot report that its workers have ended.
            if is_late and server:
                kill(server)

    def _check(self, pid: int, name: str, state: str, elapsed_s: float, is_late: bool) -> None:
        """Kill a worker that still runs too long after a signal, or has been stopped too long."""
        if is_late:
            why = "is stopped" if state == STOPPED else "has not ended in time after a signal"
            log.error("error: %s %s and is killed", name, why)
            kill(pid)
            return
        stopped_s = self._stopped_s.get(pid, 0.0) + elapsed_s if state == STOPPED else 0.0
        self._stopped_s[pid] = stopped_s
        if stopped_s > self.limit_s:
            log.error("error: %s has been stopped for %.0f s and is killed", name, stopped_s)
            kill(pid)
