"""The observers of a run: the hooks of a user's file, the trackers, and the pruner callback."""

import copy
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

from mingpt_ddp.config.builders import BUILDERS, attribute_errors_to_user_code
from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.distributed.launch.channels import PrunerCallback
from mingpt_ddp.metrics.trackers.sending import Sender
from mingpt_ddp.process.signals import SignalHandler

log = logging.getLogger(__name__)


class Hooks:
    """The hooks of this run that only observe it (config/builders.py).

    Rank zero calls them with copies of its values, so that a hook cannot change the run.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._failed: set[str] = set()

    def call(self, event: str, *values: Any) -> None:
        """Call the hooks of an event. On ranks other than zero, do nothing.

        Args:
            event: The event: `step`, `evaluate` or `end`.
            values: Arguments of the hooks.
        """
        self.group.env.call_on_rank_zero(partial(self._call, event, values))

    def _call(self, event: str, values: tuple[Any, ...]) -> None:
        for name, hook in BUILDERS["hook"].items():
            if not name.startswith(f"{event} ") or name in self._failed:
                continue
            before = self.group.heartbeat
            self.group.set_activity(f"in a hook of @on({event!r}), {before['activity']}")
            try:
                with attribute_errors_to_user_code():
                    hook(*copy.deepcopy(values))
            except (Exception, SystemExit) as error:
                self._failed.add(name)  # a hook that fails must not end the training
                log.warning("a hook of @on(%r) failed and is not called again: %s", event, error)
            self.group.set_activity(before["activity"], before["waiting"])


@dataclass(frozen=True)
class Observers:
    """The parts that observe a run. The pruner and the signals may end it early."""

    hooks: Hooks
    senders: list[Sender]  # one for each tracker, on rank zero
    # Called on rank zero after each evaluation; may end the job. None outside of a search.
    pruner: PrunerCallback | None
    signals: SignalHandler
