"""Who keeps the others waiting? Every rank tells the job's store how far it is, and all of them look."""

from __future__ import annotations

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
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from mingpt_ddp.distributed.process_group import ProcessGroup
from mingpt_ddp.torch_internals import clone_store

log = logging.getLogger(__name__)

TIMEOUT_FRACTION = 0.8  # of ddp.timeout_s: before the collectives give up, which would blame those that waited
STALLED = "stalled"
PERIOD_S = 0.25  # between two looks


class Watchdog:
    """A thread beside training that ends the process when a rank has stalled, as soon as all know which."""

    def __init__(self, group: ProcessGroup, exit: Callable[[str], None]) -> None:
        """
        Args:
            exit: ends this process, telling why; called from the thread.
        """
        self.group, self.exit = group, exit
        self.limit_s = TIMEOUT_FRACTION * group.timeout_s
        self._main = threading.get_ident()
        self._last_progress: dict[int, tuple[int, float]] = {}  # by rank: the count that was seen last, and since when
        self._last_heartbeat: dict[int, tuple[int, float]] = {}  # the same of its watch's own counter
        self._stopped = threading.Event()
        if group.store is not None:
            self._store = clone_store(group.store)
            self._tell(beat=0)  # also of a rank that will be stopped before the thread runs there is something to see
            threading.Thread(target=self._work, name="watch", daemon=True).start()

    def stop(self) -> None:
        """What it finds from now on is ignored."""
        self._stopped.set()

    def _work(self) -> None:
        beat = 0
        while not self._stopped.wait(min(PERIOD_S, self.limit_s / 10)):
            beat += 1
            with contextlib.suppress(Exception):  # the store dies with its host: then the collectives tell
                self._tell(beat)
                self._check()

    def _tell(self, beat: int) -> None:
        here = {"host": socket.gethostname(), "pid": os.getpid(), "agent": os.getppid()}
        told = {**asdict(self.group.heartbeat), "beat": beat, **here}
        self._store.set(f"at/{self.group.rank}", json.dumps(told))

    def _check(self) -> None:
        reason = self._store.get(STALLED).decode() if self._store.check([STALLED]) else None
        if reason is None:
            keys = [f"at/{rank}" for rank in range(self.group.world_size)]
            if not self._store.check(keys):
                return
            ranks = {rank: json.loads(content) for rank, content in enumerate(self._store.multi_get(keys))}
            reason = self._find(ranks, time.monotonic())
            if reason is None:
                return
            reason = self._store.compare_set(STALLED, "", reason).decode()
        if self._stopped.is_set():
            return
        if reason.startswith(f"rank {self.group.rank} "):
            frame = sys._current_frames().get(self._main)
            stack = "".join(traceback.format_stack(frame)) if frame else "gone"
            log.error("rank %d stalled here:\n%s", self.group.rank, stack, extra={"file_only": True})
        self.exit(reason)

    def _find(self, ranks: dict[int, dict[str, Any]], now: float) -> str | None:
        """Which rank has stalled, if one has."""
        for rank, told in ranks.items():
            for seen, counter in ((self._last_progress, "count"), (self._last_heartbeat, "beat")):
                if seen.get(rank, (None, 0.0))[0] != told[counter]:
                    seen[rank] = (told[counter], now)
        still = {rank: now - self._last_progress[rank][1] for rank in ranks}
        unresponsive = [
            rank for rank in ranks if now - self._last_heartbeat[rank][1] > self.limit_s
        ]  # not even its watch moves
        busy = [rank for rank in ranks if still[rank] > self.limit_s and not ranks[rank]["waiting"]]
        for rank in unresponsive or busy:
            reason = f"rank {rank} has stalled for {still[rank]:.0f} s while {ranks[rank]['what']}"
            if rank in unresponsive:  # stopped, or its machine is dead or cut off
                self._kill_if_local(ranks[rank])
                reason += "; no sign of life from there"
            return reason
        if min(still.values()) > self.limit_s:
            what = ranks[0]["what"]
            return f"all ranks wait for each other for {min(still.values()):.0f} s while {what}: look at the network"
        return None

    def _kill_if_local(self, told: dict[str, Any]) -> None:
        """A stopped process does not react to an agent, which then waits: end a sibling at once."""
        if (told["host"], told["agent"]) == (socket.gethostname(), os.getppid()):
            with contextlib.suppress(OSError):
                os.kill(told["pid"], signal.SIGKILL)
