"""Choose the trackers of a run: one module per tracker, imported when it is used."""

import importlib.util
from pathlib import Path

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.keys.schema import TrackerConfig
from mingpt_ddp.config.validation import check
from mingpt_ddp.metrics.trackers.mlflow_run import MLflowTracker
from mingpt_ddp.metrics.trackers.outbox import Outbox
from mingpt_ddp.metrics.trackers.trackio_run import TrackioTracker
from mingpt_ddp.metrics.trackers.wandb_run import WandbTracker

TRACKERS: dict[str, type[WandbTracker] | type[MLflowTracker] | type[TrackioTracker]] = {
    cls.name: cls for cls in (WandbTracker, MLflowTracker, TrackioTracker)
}


def check_installed(tracker: TrackerConfig) -> None:
    """Refuse a tracker whose library is missing.

    Raises:
        ConfigError: names the tracker and the extra to install.
    """
    for name in TRACKERS:
        if not getattr(tracker, name):
            continue
        is_installed = importlib.util.find_spec(name) is not None
        check(is_installed, f"tracker={name} is not installed; pip install 'mingpt_ddp[{name}]'")


def open_outboxes(config: Config, directory: Path, run_id: str) -> list[Outbox]:
    """Return an outbox per chosen tracker; arguments as of Outbox."""
    outboxes = []
    for name, cls in TRACKERS.items():
        if getattr(config.tracker, name):
            outboxes.append(Outbox(cls(config, directory, run_id), directory, run_id))
    return outboxes
