"""The watchdog: ranks write heartbeats to the store, and rank zero looks there for a hang.

The other ranks only read the heartbeat of rank zero, so that the store sends a constant number of
bytes to each of them. The watchdog also ends a rank that is blocked outside of Python after another
rank has failed.
"""

import contextlib
import json
import logging
import math
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

from mingpt_ddp.distributed.group.process_group import (
    FIRST_HEARTBEAT,
    PREPARING,
    STARTING,
    ProcessGroup,
)
from mingpt_ddp.distributed.group.rendezvous import TIMEOUT_FRACTION
from mingpt_ddp.process.exit import FAILURE, USER_ERROR, exit_process
from mingpt_ddp.process.failures import FIRST_FAILURE, Failures
from mingpt_ddp.process.job_store import get_now
from mingpt_ddp.process.parent_watch import kill_stopped_siblings
from mingpt_ddp.process.root_cause import AGENT_POLL_S, ProcessExit
from mingpt_ddp.torch_internals import clone_store

log = logging.getLogger(__name__)

HANG_KEY = "hang"  # key of the message in the store that names the hanging rank
# A rank may take this long for imports, reading and locking before its first batch.
START_S = 120.0
UNRESPONSIVE = "; its process does not respond"
PERIOD_S = 0.25  # time between two heartbeats
NO_HEARTBEAT = {**FIRST_HEARTBEAT, "beat": 0.0}  # stands for a rank without a heartbeat so far
# If the training thread makes no progress for this long after a failure of another rank, it is
# blocked. Otherwise the agent's SIGTERM or an error of the collective would have ended it.
BLOCKED_S = 2.0


class HangDetector:
    """Find the rank that hangs by comparing the heartbeats of ranks over time."""

    def __init__(self, limit_s: float, world_size: int) -> None:
        self.limit_s = limit_s
        self.world_size = world_size
        # The latest value of each counter, and the time when it changed. The key is the rank and
        # the counter: "count" of its training thread, or "beat" of its watchdog.
        self._latest_changes: dict[tuple[int, str], tuple[float, float]] = {}

    def find(self, heartbeats: dict[int, dict[str, Any]], now: float) -> str | None:
        """Return a message that names the rank that hangs, or None if no rank hangs.

        Args:
            heartbeats: The heartbeats that this rank reads, by rank.
            now: Seconds by the clock of this rank.
        """
        idle_s = {}  # seconds since the training thread of each rank made progress
        silent_s = {}  # seconds since the watchdog of each rank wrote a heartbeat
        unresponsive = []  # ranks that are stopped, or whose node is down
        stragglers = []
        for rank, heartbeat in heartbeats.items():
            idle_s[rank] = self._unchanged_s(rank, heartbeat, "count", now)
            silent_s[rank] = self._unchanged_s(rank, heartbeat, "beat", now)
            if silent_s[rank] > self.limit_s:
                unresponsive.append(rank)
            limit_s = self.limit_s
            if heartbeat["activity"] == STARTING:
                limit_s = max(limit_s, START_S)
            elif heartbeat["activity"] == PREPARING:
                limit_s = math.inf
            if idle_s[rank] > limit_s and not heartbeat["waiting"]:
                stragglers.append(rank)

        if unresponsive or stragglers:
            rank = (unresponsive or stragglers)[0]
            activity = heartbeats[rank]["activity"]
            reason = f"rank {rank} has stalled for {idle_s[rank]:.0f} s while {activity}"
            # When a process stops, the last progress of its training thread may be some heartbeats
            # older than the last heartbeat. So do not wait for the whole limit here.
            is_silent = silent_s[rank] > self.limit_s / 2
            return f"{reason}{UNRESPONSIVE}" if is_silent else reason
        shortest_s = min(idle_s.values())
        all_wait = all(heartbeat["waiting"] for heartbeat in heartbeats.values())
        sees_all = len(heartbeats) == self.world_size
        if sees_all and all_wait and shortest_s > self.limit_s:
            return (
                f"all ranks have waited for each other for {shortest_s:.0f} s while "
                f"{heartbeats[0]['activity']}: check the network"
            )
        return None

    def _unchanged_s(self, rank: int, heartbeat: dict[str, Any], counter: str, now: float) -> float:
        """Return the seconds since a counter of a rank changed."""
        value = heartbeat[counter]
        latest_value, changed_at = self._latest_changes.get((rank, counter), (None, now))
        if value != latest_value:
            changed_at = now
            self._latest_changes[rank, counter] = (value, now)
        return now - changed_at


class Watchdog:
    """A thread that ends the process when a rank hangs. All ranks name the same rank."""

    def __init__(self, group: ProcessGroup, exits: ProcessExit) -> None:
        self.group = group
        self.exits = exits
        # Act before the timeout of collectives, which would blame the ranks that wait.
        self.limit_s = TIMEOUT_FRACTION * group.timeout_s
        self._training_thread = threading.get_ident()
        self._detector = HangDetector(self.limit_s, group.world_size)
        self._has_all_heartbeats = False  # True once all heartbeats that this rank reads exist
        # After a failure: the last heartbeat of this rank, and when it was first seen.
        self._unchanged_since: tuple[dict[str, Any], float] | None = None

    def start(self) -> None:
        """Start the thread, which ends with the group. A single rank does not need it."""
        if self.group.store is None:
            return
        self._store = clone_store(self.group.store)
        self._send_heartbeat()  # a rank may be stopped before its thread runs
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def _run(self) -> None:
        while not self.group.closed.wait(min(PERIOD_S, self.limit_s / 10)):
            with contextlib.suppress(Exception):  # the store is lost, which collectives report
                self._send_heartbeat()
                self._leave_if_blocked()
                self._check()

    def _send_heartbeat(self) -> None:
        heartbeat = {**self.group.heartbeat, "beat": time.monotonic()}
        self._store.set(f"heartbeat/{self.group.rank}", json.dumps(heartbeat))

    def _leave_if_blocked(self) -> None:
        """Exit if another rank has failed and the training thread cannot run a signal handler.

        In a CUDA call, or in a collective that waits for the failed rank, the thread would be
        blocked until its agent sends SIGKILL. A failure ends the attempt anyway. Only a snapshot
        that is being written may still be finished.
        """
        if not self._store.check([FIRST_FAILURE]):
            return
        now = time.monotonic()
        heartbeat = self.group.heartbeat  # a new object after every change
        if self._unchanged_since is None or self._unchanged_since[0] is not heartbeat:
            self._unchanged_since = (heartbeat, now)
        if now - self._unchanged_since[1] < BLOCKED_S or self.group.is_writing:
            return
        failure = Failures(self._store, self.group.rank, self.group.world_size).first(0.0)
        if failure is None or failure.rank == self.group.rank or self.group.closed.is_set():
            return
        self._log_stack("is blocked here after another rank failed")
        self.exits.log_peer_failure(failure)  # a signal handler would not run
        exit_process(None, USER_ERROR if failure.is_final else FAILURE)

    def _log_stack(self, what: str) -> None:
        """Log the call stack of the training thread."""
        frame = sys._current_frames().get(self._training_thread)
        stack = "".join(traceback.format_stack(frame)) if frame else "the thread has ended"
        log.error("rank %d %s:\n%s", self.group.rank, what, stack, extra={"file_only": True})

    def _check(self) -> None:
        reason = self._detector.find(self._read_heartbeats(), time.monotonic())
        if reason is not None:
            self._store.compare_set(HANG_KEY, "", reason)
        if self.group.closed.is_set() or not self._store.check([HANG_KEY]):
            return
        self._exit_for(self._store.get(HANG_KEY).decode())

    def _read_heartbeats(self) -> dict[int, dict[str, Any]]:
        """Return the heartbeats that this rank reads, by rank."""
        ranks = range(self.group.world_size) if self.group.is_rank_zero else range(1)
        keys = [f"heartbeat/{rank}" for rank in ranks]
        self._has_all_heartbeats = self._has_all_heartbeats or self._store.check(keys)
        if self._has_all_heartbeats:
            heartbeats = [json.loads(heartbeat) for heartbeat in self._store.multi_get(keys)]
        else:
            heartbeats = [json.loads(get_now(self._store, key) or "null") for key in keys]
        return {rank: each or NO_HEARTBEAT for rank, each in zip(ranks, heartbeats, strict=True)}

    def _exit_for(self, reason: str) -> NoReturn:
        """Log the reason, and exit."""
        if reason.startswith(f"rank {self.group.rank} "):
            self._log_stack("hangs here")
        log.error("error: %s", reason)
        time.sleep(AGENT_POLL_S)  # the other ranks must log the reason too
        kill_stopped_siblings(self.exits.env)
        exit_process(None, FAILURE)
