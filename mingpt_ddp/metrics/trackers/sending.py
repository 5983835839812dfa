"""Send the metrics of each step of a run to its trackers, without delaying the training.

A tracker is a service such as W&B or MLflow. It gets each step only once.
"""

import importlib.util
import logging
import math
import threading
import time
from pathlib import Path
from queue import Queue
from typing import Any

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.keys.schema import TrackerConfig
from mingpt_ddp.config.validation import check
from mingpt_ddp.metrics.jsonl import METRICS, parse_record, to_metrics
from mingpt_ddp.metrics.trackers.mlflow_run import MLflowTracker
from mingpt_ddp.metrics.trackers.tracker import Tracker
from mingpt_ddp.metrics.trackers.trackio_run import TrackioTracker
from mingpt_ddp.metrics.trackers.wandb_run import WandbTracker
from mingpt_ddp.storage.remote.remote_errors import describe, redact
from mingpt_ddp.storage.storage import open_regular

log = logging.getLogger(__name__)

TRACKERS: dict[str, type[Tracker]] = {
    cls.name: cls for cls in (WandbTracker, MLflowTracker, TrackioTracker)
}
# The end of a run waits at most this long for one call of a tracker's library.
MAX_CALL_S = 60.0


def check_installed(tracker: TrackerConfig) -> None:
    """Check that the library of each chosen tracker is installed.

    Raises:
        ConfigError: A library is missing. The message has the command that installs it.
    """
    for name in TRACKERS:
        if getattr(tracker, name):
            is_installed = importlib.util.find_spec(name) is not None
            advice = f"run pip install 'mingpt_ddp[{name}]'"
            check(is_installed, f"tracker={name} is not installed; {advice}")


def open_senders(config: Config, directory: Path, run_id: str) -> list["Sender"]:
    """Create a sender for each chosen tracker."""
    senders = []
    for name, cls in TRACKERS.items():
        if getattr(config.tracker, name):
            senders.append(Sender(cls(config, directory, run_id), directory / METRICS))
    return senders


class Sender:
    """A thread that sends the metrics of each step of the run to one tracker, once.

    A step is sent only after a later snapshot: no restart will then repeat it. One thread sends the
    records of metrics.jsonl, beginning with the first step that the tracker lacks. While a server
    is down, the steps wait in that file.
    """

    def __init__(self, tracker: Tracker, metrics: Path) -> None:
        """
        Args:
            metrics: Path of the run's metrics.jsonl.
        """
        self._tracker = tracker
        self._metrics = metrics
        self._committed: float = 0  # step of the newest snapshot that the thread knows of
        # Each entry tells the thread to send all steps before the given one. The last entry also
        # has the content of result.json.
        self._queue: Queue[tuple[float, dict[str, Any] | None]] = Queue(maxsize=2)
        self._is_open = False
        self._has_failed = False
        self._has_finished = False
        self._called_at = 0.0  # time.monotonic() when the library was last called
        name = f"tracker {tracker.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def commit(self, step: int) -> None:
        """Send the steps before `step`, which has a committed snapshot.

        `step` itself is not sent yet, because its evaluation may follow. If the thread is still
        busy, the next call sends these steps.
        """
        if step > self._committed and self._queue.empty():
            self._committed = step
            self._put(step, None)

    def finish(self, result: dict[str, Any]) -> None:
        """Send all remaining steps, and the content of result.json."""
        self._called_at = time.monotonic()
        self._put(math.inf, result)

    def _put(self, end: float, result: dict[str, Any] | None) -> None:
        self._queue.put((end, result))
        if self._thread.ident is None:
            self._thread.start()

    def join(self) -> None:
        """Wait until the tracker has all steps, but at most MAX_CALL_S for each call."""
        while self._thread.is_alive() and time.monotonic() - self._called_at < MAX_CALL_S:
            self._thread.join(0.05)
        if not self._has_finished:
            message = "%s lacks the last steps; run the same command again to send them"
            log.warning(message, self._tracker.name)

    # The methods below run on the thread.

    def _run(self) -> None:
        result = None
        while result is None:
            end, result = self._queue.get()
            try:
                self._send(end)
                if result is not None:
                    self._called_at = time.monotonic()
                    self._tracker.finish(result)
                    self._has_finished = True
            except (Exception, SystemExit) as error:
                self._is_open = False
                if not self._has_failed:
                    message = "cannot send to %s, training continues without it: %s"
                    log.warning(message, self._tracker.name, redact(describe(error)))
                self._has_failed = True

    def _send(self, end: float) -> None:
        """Send the steps before `end` that the tracker lacks."""
        if not self._is_open:
            self._called_at = time.monotonic()
            self._next_step = self._tracker.start()
            self._offset = 0  # position in metrics.jsonl, in bytes
            self._points: dict[int, dict[str, float]] = {}  # steps that were read but not sent
            self._is_open = True
        self._read_new_lines()
        for step in sorted(step for step in self._points if step < end):
            metrics = self._points.pop(step)
            if step >= self._next_step:
                self._called_at = time.monotonic()
                self._tracker.log(step, metrics)
                self._next_step = step + 1
        self._has_failed = False

    def _read_new_lines(self) -> None:
        """Read new whole lines of metrics.jsonl. Drop steps that a restart or rollback repeats."""
        with open_regular(self._metrics) as file:
            file.seek(self._offset)
            while (line := file.readline()).endswith(b"\n"):
                self._offset += len(line)
                record = parse_record(line)
                if record is None:  # a kill has cut off a line
                    continue
                if "start" in record or "rollback" in record:
                    for later in [step for step in self._points if step > record["step"]]:
                        del self._points[later]
                else:
                    metrics = self._points.setdefault(record["step"], {})
                    metrics.update(to_metrics(record))
