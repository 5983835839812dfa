"""Log a run to Weights & Biases."""

import os
import shutil
from pathlib import Path
from typing import Any

from mingpt_ddp.config.config import flatten
from mingpt_ddp.config.job import run_name
from mingpt_ddp.errors import RunError
from mingpt_ddp.metrics.trackers.tracker import Tracker


class WandbTracker(Tracker):
    """A run in Weights & Biases, which is found by its id.

    Online, W&B knows which step is the next to send. Offline, each attempt writes all steps again.
    """

    name = "wandb"

    def start(self) -> int:
        import wandb

        is_online = os.environ.get("WANDB_MODE") not in ("offline", "dryrun", "disabled")
        if is_online and not wandb.login(prompt=False):
            raise RunError("there are no credentials; set WANDB_API_KEY, or WANDB_MODE=offline")
        group, _, name = run_name(self._config).rpartition("/")
        self._run = wandb.init(
            id=self._id,
            resume="allow",
            project=self._config.tracker.project,
            entity=self._config.tracker.entity,
            name=name,
            group=group or None,
            dir=str(self._directory),
            config=flatten(self._config.to_dict()),
            allow_val_change=True,
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
        )
        if self._run.offline:
            for other in self._directory.glob(f"wandb/offline-run-*-{self._id}"):
                if other != Path(self._run.dir).parent:
                    shutil.rmtree(other)
        return self._run.step

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def finish(self, result: dict[str, Any]) -> None:
        self._run.summary.update(result)
        self._run.finish()
