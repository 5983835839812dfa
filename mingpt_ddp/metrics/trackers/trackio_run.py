"""Log a run to Trackio."""

import os
import urllib.request
from typing import Any

from mingpt_ddp.config.config import flatten
from mingpt_ddp.config.job import run_name
from mingpt_ddp.metrics.trackers.tracker import Tracker

TIMEOUT_S = 10.0


class TrackioTracker(Tracker):
    """A run in Trackio, which is found by its name. The name contains the run's id.

    Trackio knows which step is the next to send.
    """

    name = "trackio"

    def start(self) -> int:
        import trackio

        # Check that the server answers. If it does not, trackio.init would begin a new run.
        if server := os.environ.get("TRACKIO_SERVER_URL"):
            url, _, _ = server.partition("?")  # without its write_token
            urllib.request.urlopen(url, timeout=TIMEOUT_S).close()
        self._run = trackio.init(
            self._config.tracker.project,
            f"{run_name(self._config)}-{self._id}",
            config=flatten(self._config.to_dict()),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return self._run._next_step

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def finish(self, result: dict[str, Any]) -> None:
        self._run.finish()
