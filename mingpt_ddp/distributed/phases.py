"""The phases of a training step, marked for the watchdog, the profiler and the rank's clock."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mingpt_ddp.distributed.strategies.base import Strategy

FETCH = "fetch the batch"  # name of the profiler's events of a data wait
ACTIVITIES = {
    "fetch": "fetching the batch of step {}",
    "forward": "in the forward pass of step {}",
    "backward": "in the backward pass of step {}",
    "update": "in the optimizer update of step {}",
}


class StepPhases:
    """Mark the phases: `with phase("forward", step): ...`."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.fetch_s = 0.0  # seconds to fetch the latest batch

    @contextmanager
    def __call__(self, name: str, step: int, waiting: bool = False) -> Iterator[None]:
        """Put the phase into the heartbeat; time the fetch, and name it in a profile.

        Args:
            name: a key of ACTIVITIES.
            waiting: this phase waits for the other ranks, which the watchdog does not blame it for.
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
        with torch.profiler.record_function(FETCH):
            yield
        self.fetch_s = time.perf_counter() - begin
