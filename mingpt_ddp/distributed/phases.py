"""Mark the phases of a training step for the watchdog, the profiler and the clock of the rank."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mingpt_ddp.distributed.strategies.base import Strategy

FETCH_EVENT = "fetch the batch"  # name of this event in the profiler
# For each phase, the activity in the heartbeat.
ACTIVITIES = {
    "fetch": "fetching the batch of step {}",
    "forward": "in the forward pass of step {}",
    "backward": "in the backward pass of step {}",
    "update": "in the optimizer update of step {}",
}


class StepPhases:
    """Mark a phase of a step, as in `with phase("forward", step): ...`."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.fetch_s = 0.0  # seconds that it took to fetch the latest batch

    @contextmanager
    def __call__(self, name: str, step: int, waiting: bool = False) -> Iterator[None]:
        """Write the phase to the heartbeat. For a fetch, also measure its time and profile it.

        Args:
            name: A key of ACTIVITIES.
            waiting: True if this phase waits for other ranks. Then the watchdog does not blame this
                rank.
        """
        strategy = self.strategy
        if name != "fetch":
            waiting = waiting or strategy.waits_in_passes
            strategy.group.set_activity(ACTIVITIES[name].format(step), waiting)
            yield
            return
        strategy.clock.start()
        strategy.group.set_activity(ACTIVITIES[name].format(step), waiting)
        begin = time.perf_counter()
        with torch.profiler.record_function(FETCH_EVENT):
            yield
        self.fetch_s = time.perf_counter() - begin
