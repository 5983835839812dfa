"""End the processes of an attempt that nothing else would end: stopped ones, and after a signal."""

import logging
import os
import threading
import time
from multiprocessing.process import BaseProcess

from mingpt_ddp.distributed.launch.fork_server import server_pid
from mingpt_ddp.distributed.launch.workers import SignalForwarder
from mingpt_ddp.linux import STOPPED, kill, read_state

log = logging.getLogger(__name__)

POLL_S = 0.5
SERVER = "the fork server of the workers"
MARGIN_S = 3.0  # beyond ddp.timeout_s: before that, the ranks name one of theirs that is stopped


class ProcessWatch:
    """A thread of the launcher: its main thread may wait for the processes that this one kills.

    A stopped process ignores all signals but SIGKILL, and a stopped fork server neither forks nor
    reports that a worker has exited.
    """

    def __init__(self, forwarder: SignalForwarder, timeout_s: float, grace_s: float) -> None:
        """
        Args:
            timeout_s: ddp.timeout_s.
            grace_s: for which processes may go on after a signal.
        """
        self.forwarder = forwarder
        self.limit_s = timeout_s + MARGIN_S
        self.grace_s = grace_s
        self.workers: list[BaseProcess] = []  # that are about to start, or run
        self.store: BaseProcess | None = None
        self._stopped_s: dict[int, float] = {}  # by process id: for how long it has been stopped
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
            alive = self._alive()
            for pid, (name, state) in alive.items():
                self._kill_if_stopped(pid, name, state, elapsed_s)
            if now > self.forwarder.kill_at(self.grace_s):
                self._end_all(alive)

    def _alive(self) -> dict[int, tuple[str, str]]:
        """Return the name and the state of each process that has not ended, by process id."""
        server = server_pid()
        named = {process.pid: process.name for process in [*self.workers, self.store] if process}
        named[server] = SERVER
        alive = {}
        for pid, name in named.items():
            state = read_state(pid, {os.getpid(), server})
            if pid and state:
                alive[pid] = (name, state)
        return alive

    def _kill_if_stopped(self, pid: int, name: str, state: str, elapsed_s: float) -> None:
        if state != STOPPED:
            self._stopped_s.pop(pid, None)
            return
        self._stopped_s[pid] = self._stopped_s.get(pid, 0.0) + elapsed_s
        if self._stopped_s[pid] > self.limit_s:
            log.error("error: %s has been stopped for %.0f s", name, self._stopped_s.pop(pid))
            kill(pid)

    def _end_all(self, alive: dict[int, tuple[str, str]]) -> None:
        """Kill the workers that are alive after a signal, and the fork server if it blocks."""
        workers = {worker.name for worker in self.workers}
        for pid, (name, state) in alive.items():
            if name in workers:
                why = "is stopped" if state == STOPPED else "has not ended in time after a signal"
                log.error("error: %s %s and is killed", name, why)
                kill(pid)
            elif name == SERVER and (state == STOPPED or self.forwarder.is_interrupted_twice):
                kill(pid)
