"""A run in Trackio."""

import os
import urllib.request
from pathlib import Path
from typing import Any

from mingpt_ddp.config.config import Config, flatten
from mingpt_ddp.metrics.trackers.outbox import REMOTE_S, Points
from mingpt_ddp.storage.run_directory import run_name


class TrackioTracker:
    """The run is found by its name, which has the id. Trackio says which step comes next."""

    name = "trackio"

    def __init__(self, config: Config, directory: Path, run_id: str) -> None:
        self._config = config
        self._id = run_id
        self._server = os.environ.get("TRACKIO_SERVER_URL")
        self.is_remote = bool(self._server or os.environ.get("TRACKIO_SPACE_ID"))

    def find_run(self) -> int:
        import trackio

        if self._server:  # trackio.init would take a server that is away for an empty one
            url, _, _ = self._server.partition("?")  # without its write_token
            urllib.request.urlopen(url, timeout=REMOTE_S).close()
        project = self._config.tracker.project
        name = f"{run_name(self._config)}-{self._id}"
        config = flatten(self._config.to_dict())
        self._run = trackio.init(
            project,
            name,
            config=config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return self._run._next_step

    def send(self, points: Points) -> None:
        for step, metrics in points:
            self._run.log(metrics, step=step)

    def finish(self, result: dict[str, Any]) -> None:
        self._run.finish()
