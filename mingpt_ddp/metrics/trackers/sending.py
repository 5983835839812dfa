"""Send the metrics of a run to its trackers: each step once, without delaying the training."""

import importlib.util
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias, TypeVar

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.keys.schema import TrackerConfig
from mingpt_ddp.config.validation import check
from mingpt_ddp.metrics.jsonl import METRICS, read_history, to_metrics, to_record
from mingpt_ddp.metrics.trackers.mlflow_run import MLflowTracker
from mingpt_ddp.metrics.trackers.tracker import Tracker
from mingpt_ddp.metrics.trackers.trackio_run import TrackioTracker
from mingpt_ddp.metrics.trackers.wandb_run import WandbTracker
from mingpt_ddp.storage.remote.remote_errors import describe, redact

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
Point: TypeAlias = tuple[int, dict[str, float]]  # a step and its metrics by tag
TRACKERS: dict[str, type[WandbTracker] | type[MLflowTracker] | type[TrackioTracker]] = {
    cls.name: cls for cls in (WandbTracker, MLflowTracker, TrackioTracker)
}
QUEUE = 10_000  # steps that wait in memory for a server
RETRY_S = 5.0
END_S = 30.0  # how long the end of a run waits for one call of a library


def check_installed(tracker: TrackerConfig) -> None:
    """Refuse a tracker whose library is missing.

    Raises:
        ConfigError: names the tracker and the extra to install.
    """
    for name in TRACKERS:
        if getattr(tracker, name):
            is_installed = importlib.util.find_spec(name) is not None
            extra = f"pip install 'mingpt_ddp[{name}]'"
            check(is_installed, f"tracker={name} is not installed; {extra}")


def open_senders(config: Config, directory: Path, run_id: str, step: int) -> list["Sender"]:
    """Return a sender for each chosen tracker; see Sender for `step`."""
    senders = []
    for name, cls in TRACKERS.items():
        if getattr(config.tracker, name):
            senders.append(Sender(cls(config, directory, run_id), directory / METRICS, step))
    return senders


class Sender:
    """Send each step to one tracker, once a later snapshot is committed and no restart repeats it.

    One thread sends. What it has not sent, because the server was away or an earlier attempt was
    killed, it reads from metrics.jsonl, beginning with the first step that the tracker lacks.
    """

    def __init__(self, tracker: Tracker, metrics: Path, step: int) -> None:
        """
        Args:
            metrics: metrics.jsonl of the run.
            step: Step of the snapshot with which this attempt begins.
        """
        self._tracker = tracker
        self._metrics = metrics
        self._first_step = step + 1
        self._waiting: dict[int, dict[str, float]] = {}  # steps that a restart would repeat
        self._committed: float = step  # step of the newest committed snapshot
        self._queue: deque[Point] = deque()
        self._reads_file = True  # the queue lacks steps that metrics.jsonl has
        self._result: dict[str, Any] = {}
        self._ended = threading.Event()
        self._wake = threading.Event()
        self._call_began = math.inf  # time.monotonic(); infinite between two calls of the library
        self._has_failed = False
        self._has_finished = False
        name = f"tracker {tracker.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Take metrics by tag, which metrics.jsonl has already."""
        if step >= self._first_step:
            self._waiting.setdefault(step, {}).update(to_metrics(to_record(step, metrics)))

    def rollback(self, step: int) -> None:
        """Forget the steps after `step`, which will be repeated."""
        for later in [at for at in self._waiting if at > step]:
            del self._waiting[later]

    def commit(self, step: float) -> None:
        """Send what is known of the steps before `step`, which has a committed snapshot.

        `step` itself may still be evaluated.
        """
        if step <= self._committed:
            return
        self._committed = step
        for ready in sorted(at for at in self._waiting if at < step):
            point = ready, self._waiting.pop(ready)
            if len(self._queue) < QUEUE:
                self._queue.append(point)
            else:
                self._reads_file = True
        self._wake.set()
        if self._thread.ident is None:
            self._thread.start()

    def finish(self, result: dict[str, Any]) -> None:
        """Send all that is left, and the content of result.json."""
        self._result = result
        self.commit(math.inf)
        self._ended.set()
        self._wake.set()

    def join(self) -> None:
        """Wait until all has arrived, but not for a server that does not answer."""
        while self._thread.is_alive() and time.monotonic() - self._call_began < END_S:
            self._thread.join(0.05)
        if not self._has_finished:
            message = "%s lacks the last steps; run the same command again to send them"
            log.warning(message, self._tracker.name)

    # On the thread.

    def _run(self) -> None:
        while True:
            is_last_try = self._ended.is_set()
            try:
                self._send()
                return
            except (Exception, SystemExit) as error:
                if not self._has_failed:
                    message = "cannot send to %s, training continues without it: %s"
                    log.warning(message, self._tracker.name, redact(describe(error)))
                self._has_failed = True
            if is_last_try:
                return
            self._ended.wait(RETRY_S)

    def _send(self) -> None:
        """Send all steps and the result. Return at the end of the run."""
        next_step = self._call(self._tracker.start)
        self._reads_file = True
        while True:
            has_ended = self._ended.is_set()  # before the last steps are taken
            for step, metrics in self._take(next_step):
                if step >= next_step:
                    self._call(self._tracker.log, step, metrics)
                    self._has_failed = False
                    next_step = step + 1
            if has_ended:
                self._call(self._tracker.finish, self._result)
                self._has_finished = True
                return
            self._wake.wait()
            self._wake.clear()

    def _take(self, next_step: int) -> list[Point]:
        """Return the steps to send now: those of the queue, or all from `next_step` on."""
        if not self._reads_file:
            return [self._queue.popleft() for _ in range(len(self._queue))]
        self._reads_file = False
        self._queue.clear()  # before the end is read: what the file is not asked for stays queued
        end = self._committed
        points: dict[int, dict[str, float]] = {}
        for row in read_history(self._metrics).rows:
            if next_step <= row["step"] < end:
                points.setdefault(row["step"], {}).update(to_metrics(row))
        return sorted(points.items())

    def _call(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the library. `join` waits for this call no longer than it should take."""
        self._call_began = time.monotonic()
        try:
            return method(*args, **kwargs)
        finally:
            self._call_began = math.inf
