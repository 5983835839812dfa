"""Define the interface of a tracker: a service such as W&B or MLflow that shows metrics."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from mingpt_ddp.config.config import Config


class Tracker(ABC):
    """The connection of one run to a tracker. A step that has been sent cannot be taken back.

    A method may raise any exception. The sender then calls `start` again.
    """

    name: str  # the name of the tracker, which its library and its configuration key share

    def __init__(self, config: Config, directory: Path, run_id: str) -> None:
        """
        Args:
            directory: The run directory.
            run_id: Identifies the run at the tracker. It stays the same when the run is restarted.
        """
        self._config = config
        self._directory = directory
        self._id = run_id

    @abstractmethod
    def start(self) -> int:
        """Open the run by its id, or create it. Return the first step that the tracker lacks."""

    @abstractmethod
    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Add the metrics of a step by tag. Each call has a later step than the calls before."""

    @abstractmethod
    def finish(self, result: dict[str, Any]) -> None:
        """Add the content of result.json. Return when all steps have arrived."""
