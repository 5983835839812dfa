"""Send the points of a run to a tracker that takes none back: each point once, from a thread.

A step is sent once a snapshot of a later step is durable, so that no restart repeats it, or at the
end of the run. What a killed attempt has logged is read from metrics.jsonl; which steps the run has
already, the tracker itself is asked.
"""

import contextlib
import logging
import math
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from mingpt_ddp.config.config import Config
from mingpt_ddp.metrics.jsonl import METRICS, read_history, to_metrics, to_record
from mingpt_ddp.metrics.trackers.sample_texts import read_samples
from mingpt_ddp.storage.remote_errors import describe, redact
from mingpt_ddp.storage.storage import atomic_write, read_regular

log = logging.getLogger(__name__)

# Sorted by step: a step with its numbers by tag, perhaps with a text as `sample`.
Points = list[tuple[int, dict[str, Any]]]
MAX_CACHED = 5_000  # steps; more are read from metrics.jsonl when they are due
MAX_MARKER_BYTES = 1000
BATCH = 200  # steps per call
LOCAL_S = 60.0  # how long the end of a run waits for one call on this machine
REMOTE_S = 8.0  # or over a network


class Tracker(Protocol):
    """A run in the store of a tracker.

    Any method may raise anything; `connect` is then called again.
    """

    name: str
    is_remote: bool

    def load(self) -> None:
        """Import the library."""

    def connect(self) -> None:
        """Find the run by its id, or create it; ask which steps it has."""

    def send(self, points: Points) -> None:
        """Add the points that the run does not have yet."""

    def finish(self, result: dict[str, Any]) -> None:
        """Add the result of the run; return when all points are stored."""


class Outbox:
    """The points of a run on their way to one tracker.

    Only `join` waits, for seconds, and only at the end.
    """

    def __init__(
        self, tracker: Tracker, directory: Path, run_id: str, step: int, covered: int
    ) -> None:
        """
        Args:
            directory: of the run, with metrics.jsonl.
            run_id: of the run in all trackers.
            step: steps done; metrics.jsonl has their points.
            covered: the step of the snapshot that has recorded `run_id`; 0 if there is none yet.
        """
        self._tracker = tracker
        self._history = directory / METRICS
        self._id = run_id
        # the run and its last step, when all is sent
        self._marker = directory / f".tracked-{tracker.name}"
        self._thread = threading.Thread(
            target=self._run, name=f"tracker {tracker.name}", daemon=True
        )
        self._changed = threading.Condition()
        self._cache: dict[int, dict[str, Any]] = {}  # records by step
        self._only_in_file: float = step  # for steps up to this one, metrics.jsonl is read
        # Steps below it will not be repeated. A complete run that is started again has nothing to
        # connect for.
        self._covered: float = 0 if self._has_sent_all(step) else covered
        self._tried: float = 1  # steps below it have been sent, or their sending has failed
        self._sent: float = 1
        self._result: dict[str, Any] = {}
        self._is_connected = False
        self._has_failed = False
        self._is_closed = False
        self._deadline = 0.0  # time.monotonic() until which `join` waits

    # Called by training: a sink of metrics.

    def start(self, step: int, world_size: int) -> None:
        self._thread.start()

    def rollback(self, step: int) -> None:
        with self._changed:
            self._cache = {other: record for other, record in self._cache.items() if other <= step}

    def log(self, step: int, metrics: dict[str, float]) -> None:
        with self._changed:
            self._cache.setdefault(step, {}).update(to_record(step, metrics))
            if len(self._cache) > MAX_CACHED:
                self._cache = {}
                self._only_in_file = step

    def complete(self, step: int, config: Config) -> None:
        pass

    def cover(self, step: float) -> None:
        """Send the points before `step`, of which there is a durable snapshot."""
        with self._changed:
            self._covered = max(self._covered, step)
            self._changed.notify()

    def finish(self, step: int, result: dict[str, Any]) -> None:
        """Send all points and the result, unless a run of the same length has done so."""
        if self._has_sent_all(step):
            return
        self._id_and_step = f"{self._id} {step}"
        self._result = result
        self._deadline = time.monotonic() + self._patience
        self.cover(math.inf)

    def _has_sent_all(self, step: int) -> bool:
        """Return whether the tracker has all points and the result of the run of this length."""
        with contextlib.suppress(OSError, ValueError):
            return read_regular(self._marker, MAX_MARKER_BYTES) == f"{self._id} {step}".encode()
        return False

    def join(self) -> None:
        """Wait until all is sent, but not for a call that takes longer than it should."""
        if self._covered < math.inf:
            return
        while self._thread.is_alive() and time.monotonic() < self._deadline:
            self._thread.join(0.05)
        if self._thread.is_alive() or self._has_failed:
            message = "%s lacks the last points; run the same command again to send them"
            log.warning(message, self._tracker.name)

    def close(self) -> None:
        """End the thread, after the call in progress."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    # On the thread.

    @property
    def _patience(self) -> float:
        return REMOTE_S if self._tracker.is_remote else LOCAL_S

    def _run(self) -> None:
        while self._tried < math.inf:
            with self._changed:
                self._changed.wait_for(lambda: self._covered > self._tried or self._is_closed)
                if self._is_closed:
                    return
                covered = self._covered
            try:
                self._send(covered)
                self._has_failed = False
            except (Exception, SystemExit) as error:
                self._is_connected = False
                self._sent = 1
                self._only_in_file = max(self._only_in_file, covered)  # send it all again
                if not self._has_failed:
                    message = "cannot send to %s, training continues without it: %s"
                    log.warning(message, self._tracker.name, redact(describe(error)))
                self._has_failed = True
            self._tried = covered

    def _send(self, covered: float) -> None:
        tracker = self._tracker
        if not self._is_connected:
            self._deadline = time.monotonic() + LOCAL_S
            tracker.load()
            self._deadline = time.monotonic() + self._patience
            tracker.connect()
            self._is_connected = True
        points = self._due(covered)
        for begin in range(0, len(points), BATCH):
            self._deadline = time.monotonic() + self._patience
            tracker.send(points[begin : begin + BATCH])
        self._sent = covered
        if covered == math.inf:
            self._deadline = time.monotonic() + self._patience
            tracker.finish(self._result)
            atomic_write(self._marker, self._id_and_step.encode())

    def _due(self, covered: float) -> Points:
        """Return the points of steps below `covered` that have not been sent; forget them."""
        records: dict[int, dict[str, Any]] = {}
        if self._sent <= self._only_in_file:
            records = read_history(self._history).by_step()
        with self._changed:
            for step in [step for step in self._cache if step < covered]:
                records.setdefault(step, {}).update(self._cache.pop(step))
        texts = read_samples(self._history.parent)
        points: Points = []
        for step in sorted({*records, *texts}):
            if not self._sent <= step < covered:
                continue
            metrics: dict[str, Any] = dict(to_metrics(records.get(step, {})))
            if step in texts:
                metrics["sample"] = texts[step]
            if metrics:
                points.append((step, metrics))
        return points
