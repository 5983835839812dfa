"""Time the work of this rank in a step, without the time in which it waits for other ranks.

All ranks end a step together, because each waits for the slowest one in a collective. To show which
rank is slow, this clock stops before the wait: it measures from fetching the batch to the last
gradient. If the passes themselves wait for other ranks, the work is not measured.
"""

import time
from collections import deque
from typing import Any

import torch
from torch import nn

LATEST_STEPS = 50  # a reading averages at most this many of the latest steps


class StepClock:
    """Work times of the latest steps, by the clock of the GPU if there is one.

    Only `read` waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.n_micro_batches = 1  # number of this rank's micro-batches in a step
        self._steps: deque[list[Any]] = deque(maxlen=LATEST_STEPS)  # begin and end of each step

    def attach(self, model: nn.Module, n_micro_batches: int) -> None:
        """Watch the backward passes of a model.

        Args:
            n_micro_batches: Number of this rank's micro-batches in a step.
        """
        self.n_micro_batches = n_micro_batches
        first = next((p for p in model.parameters() if p.requires_grad), None)
        if first is not None:  # its gradient is usually the last
            first.register_post_accumulate_grad_hook(lambda _: self._stop())

    def start(self) -> None:
        """Begin a step."""
        self._steps.append([self._now()])

    def read(self) -> float:
        """Return the mean seconds of work per step since the last reading.

        Return 0 if no step was measured. Waits for the device.
        """
        seconds = [self._seconds(*step) for step in self._steps if len(step) == 2]
        self._steps.clear()
        return sum(seconds) / len(seconds) if seconds else 0.0

    def _stop(self) -> None:
        """Record the end of the work. The end of a later micro-batch replaces an earlier one."""
        if self._steps:
            self._steps[-1][1:] = [self._now()]

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        if isinstance(end, float):
            return end - begin
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
