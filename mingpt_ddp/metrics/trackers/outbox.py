"""Send the points of a run to a tracker that takes none back: each point once, from threads.

A step is sent once a snapshot of a later step is durable, so that no restart repeats it, or at the
end of the run. metrics.jsonl has the points, those of killed attempts too; which of them the run
has already, the tracker itself is asked.
"""

import contextlib
import importlib
import logging
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from mingpt_ddp.metrics.jsonl import METRICS, read_history, to_metrics
from mingpt_ddp.metrics.trackers.sample_texts import read_samples
from mingpt_ddp.storage.remote.remote_errors import describe, redact
from mingpt_ddp.storage.storage import atomic_write, read_regular

log = logging.getLogger(__name__)

# Sorted by step: a step with its numbers by tag, perhaps with a text as `sample`.
Points = list[tuple[int, dict[str, Any]]]
MAX_MARKER_BYTES = 1000
BATCH = 200  # steps per call
LOCAL_S = 60.0  # how long the end of a run waits for one call on this machine
REMOTE_S = 8.0  # or over a network


class Tracker(Protocol):
    """A run in the store of a tracker.

    Any method may raise anything; `find_run` is then called again.
    """

    name: str  # of the library, too
    is_remote: bool

    def find_run(self) -> int:
        """Find the run by its id, or create it; return the first step that it may lack."""

    def send(self, points: Points) -> None:
        """Add the points that the run does not have yet."""

    def finish(self, result: dict[str, Any]) -> None:
        """Add the result of the run; return when all points are stored."""


class Outbox:
    """The points of a run on their way to one tracker, sent by one thread at a time.

    Only `join` waits, for seconds, and only at the end.
    """

    def __init__(self, tracker: Tracker, directory: Path, run_id: str) -> None:
        """
        Args:
            directory: of the run, with metrics.jsonl.
            run_id: of the run in all trackers.
        """
        self._tracker = tracker
        self._directory = directory
        self._id = run_id
        # The file names the run and its last step when all is sent.
        self._marker = directory / f".tracked-{tracker.name}"
        self._thread = threading.Thread()  # the last one; it has not been started
        self._sending = threading.Lock()
        self._covered = 0  # steps below it have been sent, or their sending has failed
        self._has_run = False
        self._has_failed = False
        self._deadline = math.inf  # time.monotonic() until which `join` waits for a call

    def cover(self, step: int) -> None:
        """Send the points before `step`, of which there is a durable snapshot.

        While others are being sent they are left to a later snapshot.
        """
        if step > self._covered and not self._thread.is_alive():
            self._start(step, None)

    def finish(self, step: int, result: dict[str, Any]) -> None:
        """Send all points and the result, unless a run of the same length has done so."""
        with contextlib.suppress(OSError, ValueError):
            if read_regular(self._marker, MAX_MARKER_BYTES) == self._ending(step):
                return
        self._start(step + 1, result)

    def join(self) -> None:
        """Wait until all is sent, but not for a call that takes longer than it should."""
        while self._thread.is_alive() and time.monotonic() < self._deadline:
            self._thread.join(0.05)
        if self._thread.is_alive() or self._has_failed:
            message = "%s lacks the last points; run the same command again to send them"
            log.warning(message, self._tracker.name)

    def _start(self, end: int, result: dict[str, Any] | None) -> None:
        name = f"tracker {self._tracker.name}"
        self._thread = threading.Thread(
            target=self._run, args=(end, result), name=name, daemon=True
        )
        self._thread.start()

    def _ending(self, step: int) -> bytes:
        return f"{self._id} {step}".encode()

    # On the thread.

    def _run(self, end: int, result: dict[str, Any] | None) -> None:
        """Send the points before `end`; at the end of the run the result, too."""
        with self._sending:  # at the end of the run an earlier thread may be
            try:
                self._send(end)
                if result is not None:
                    with self._limited():
                        self._tracker.finish(result)
                    atomic_write(self._marker, self._ending(end - 1))
                self._has_failed = False
            except (Exception, SystemExit) as error:
                self._has_run = False
                if not self._has_failed:
                    message = "cannot send to %s, training continues without it: %s"
                    log.warning(message, self._tracker.name, redact(describe(error)))
                self._has_failed = True
            self._covered = end

    def _send(self, end: int) -> None:
        begin = self._covered
        if not self._has_run:
            self._marker.unlink(missing_ok=True)  # an offline run is about to be replaced
            importlib.import_module(self._tracker.name)
            with self._limited():
                begin = self._tracker.find_run()
            self._has_run = True
        points = self._points(begin, end)
        for first in range(0, len(points), BATCH):
            with self._limited():
                self._tracker.send(points[first : first + BATCH])

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        """Let `join` wait for this call no longer than it should take."""
        self._deadline = time.monotonic() + (REMOTE_S if self._tracker.is_remote else LOCAL_S)
        try:
            yield
        finally:
            self._deadline = math.inf

    def _points(self, begin: int, end: int) -> Points:
        """Return the points of the steps from `begin` to before `end`."""
        points: dict[int, dict[str, Any]] = {}
        for step, record in read_history(self._directory / METRICS).by_step().items():
            points[step] = dict(to_metrics(record))
        for step, text in read_samples(self._directory).items():
            points.setdefault(step, {})["sample"] = text
        return [(step, points[step]) for step in sorted(points) if begin <= step < end]
