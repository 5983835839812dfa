"""The interface of the sinks that metrics are written to."""

from __future__ import annotations

from typing import Any


class MetricsLogger:
    """A sink that discards everything, for ranks that have nothing to write."""

    def start(self, step: int, world_size: int) -> None:
        """Begin an attempt after `step`; metrics of later steps are obsolete."""

    def rollback(self, step: int) -> None:
        """Begin again after `step` within an attempt; metrics of later steps are obsolete."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write the values by tag."""

    def log_text(self, step: int, tag: str, text: str) -> None:
        """Write a text that is shown as it stands."""

    def complete(self, step: int, config: dict[str, Any], metrics: dict[str, float]) -> None:
        """Write the results of a run that ends at `step`.

        Args:
            config: its values by group and key.
        """

    def flush(self) -> None:
        """Write what is buffered."""

    def close(self) -> None:
        """Flush and release the file."""
