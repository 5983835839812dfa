"""The watchdog: every rank writes its heartbeat to the store and reads those of all ranks to find
one that hangs.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from mingpt_ddp.distributed.exit import AGENT_POLL_S, FAILURE, exit_process
from mingpt_ddp.distributed.process_group import ProcessGroup
from mingpt_ddp.torch_internals import clone_store

log = logging.getLogger(__name__)

# of ddp.timeout_s: earlier than collectives, whose timeout would blame the waiting ranks
TIMEOUT_FRACTION = 0.8
HANG = "hang"  # key in the store: which rank hangs
UNRESPONSIVE = "; its process does not respond"
PERIOD_S = 0.25  # between two heartbeats


class Watchdog:
    """A thread that ends the process when a rank hangs, after all ranks have agreed on which
    one.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.limit_s = TIMEOUT_FRACTION * group.timeout_s
        self._training_thread = threading.get_ident()
        # By rank and counter ("count" of its training thread, "beat" of its watchdog): the value
        # and when it changed.
        self._latest: dict[tuple[int, str], tuple[float, float]] = {}
        self._stopped = threading.Event()
        if group.store is not None:
            self._store = clone_store(group.store)
            self._send_heartbeat()  # a rank may be stopped before its thread runs
            threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """Ignore hangs from now on."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(min(PERIOD_S, self.limit_s / 10)):
            # the store died with its host; collectives report that
            with contextlib.suppress(Exception):
                self._send_heartbeat()
                self._check()

    def _send_heartbeat(self) -> None:
        process = {"host": socket.gethostname(), "pid": os.getpid(), "beat": time.monotonic()}
        self._store.set(
            f"heartbeat/{self.group.rank}", json.dumps({**self.group.heartbeat, **process})
        )

    def _check(self) -> None:
        keys = [f"heartbeat/{rank}" for rank in range(self.group.world_size)]
        if not self._store.check(keys):
            return
        heartbeats = [json.loads(heartbeat) for heartbeat in self._store.multi_get(keys)]
        if (found := self._find_hang(heartbeats)) is not None:
            self._store.compare_set(HANG, "", found)
        if self._stopped.is_set() or not self._store.check([HANG]):
            return
        reason = self._store.get(HANG).decode()
        if reason.startswith(f"rank {self.group.rank} "):
            frame = sys._current_frames().get(self._training_thread)
            stack = "".join(traceback.format_stack(frame)) if frame else "the thread has ended"
            log.error("rank %d hangs here:\n%s", self.group.rank, stack, extra={"file_only": True})
        log.error("error: %s", reason)
        time.sleep(AGENT_POLL_S)  # so that the other ranks log the reason too
        for rank, heartbeat in enumerate(heartbeats):
            if reason.startswith(f"rank {rank} ") and reason.endswith(UNRESPONSIVE):
                self._kill_if_local(heartbeat)
        exit_process(None, FAILURE)

    def _find_hang(self, heartbeats: list[dict[str, Any]]) -> str | None:
        """Return a message that names the rank that hangs, if any; `heartbeats` are in rank
        order.
        """
        idle_s = [
            self._unchanged_s(rank, heartbeat, "count") for rank, heartbeat in enumerate(heartbeats)
        ]
        silent_s = [
            self._unchanged_s(rank, heartbeat, "beat") for rank, heartbeat in enumerate(heartbeats)
        ]
        ranks = range(len(heartbeats))
        # stopped, or its node is down
        unresponsive = [rank for rank in ranks if silent_s[rank] > self.limit_s]
        stragglers = [
            rank
            for rank in ranks
            if idle_s[rank] > self.limit_s and not heartbeats[rank]["waiting"]
        ]
        for rank in unresponsive or stragglers:
            reason = (
                f"rank {rank} has stalled for {idle_s[rank]:.0f} s while "
                f"{heartbeats[rank]['activity']}"
            )
            # The training thread's last change may precede the watchdog's by some heartbeats.
            return f"{reason}{UNRESPONSIVE}" if silent_s[rank] > self.limit_s / 2 else reason
        if min(idle_s) > self.limit_s:
            activity = heartbeats[0]["activity"]
            return (
                f"all ranks have waited for each other for {min(idle_s):.0f} s while "
                f"{activity}: check the network"
            )
        return None

    def _unchanged_s(self, rank: int, heartbeat: dict[str, Any], counter: str) -> float:
        """Return the seconds since a counter of a rank changed, by the clock of this rank."""
        value = heartbeat[counter]
        now = time.monotonic()
        if self._latest.get((rank, counter), (None, 0.0))[0] != value:
            self._latest[rank, counter] = (value, now)
        return now - self._latest[rank, counter][1]

    def _kill_if_local(self, heartbeat: dict[str, Any]) -> None:
        """SIGKILL a stopped process of the same agent: it ignores SIGTERM, and the agent would wait
        for it.

        The store is not authenticated: it may name any process.
        """
        if heartbeat["host"] == socket.gethostname():
            with contextlib.suppress(OSError, ValueError):
                pid = int(heartbeat["pid"])
                parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == os.getppid():
                    os.kill(pid, signal.SIGKILL)
