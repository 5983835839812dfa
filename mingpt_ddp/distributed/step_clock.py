"""Time the work of this rank in a step, without the time in which it waits for other ranks.

All ranks end a step together, because each waits for the slowest in a collective. Only the time
before shows which rank that is: from the start of fetching the batch to the last gradient, which
DDP reduces last. Where the passes themselves wait for other ranks, only fetching the batch and the
forward passes of the innermost modules count.
"""

import time
from collections import deque
from typing import Any

import torch
from torch import nn

LATEST = 50  # steps that a reading averages


class StepClock:
    """Work times of the latest steps, by a GPU's own clock if there is one.

    Only `read` synchronizes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.micro_batches = 1  # of this rank in a step
        # The start and end of each stretch of work.
        self._steps: deque[list[tuple[Any, Any]]] = deque(maxlen=LATEST)
        self._begin: Any = None
        self._is_split = False

    def attach(self, model: nn.Module, micro_batches: int, is_split: bool) -> None:
        """Watch the passes of a model.

        Args:
            micro_batches: of this rank in a step.
            is_split: its passes wait for other ranks.
        """
        self.micro_batches = micro_batches
        self._is_split = is_split
        if is_split:
            self._watch_leaves(model)
            return
        first = next((p for p in model.parameters() if p.requires_grad), None)
        if first is not None:  # its gradient is usually the last
            first.register_post_accumulate_grad_hook(lambda _: self._stop(replaces=True))

    def _watch_leaves(self, model: nn.Module) -> None:
        for module in model.modules():
            if any(module.children()):
                continue
            module.register_forward_pre_hook(lambda *_: self._resume())
            # Stop before collectives of the outputs.
            module.register_forward_hook(lambda *_: self._stop(), prepend=True)

    def start(self) -> None:
        """Begin a step."""
        self._steps.append([])
        self._begin = self._now()

    def fetched(self) -> None:
        """Note that the batch has arrived."""
        if self._is_split:
            self._stop()

    def read(self) -> float:
        """Return the mean seconds of work per step since the last reading, 0 without any.

        Waits for the device.
        """
        seconds = 0.0
        steps = 0
        for stretches in self._steps:
            if stretches:
                seconds += sum(self._seconds(begin, end) for begin, end in stretches)
                steps += 1
        self._steps.clear()
        self._begin = None
        return seconds / steps if steps else 0.0

    def _resume(self) -> None:
        if torch.is_grad_enabled():  # not in an evaluation
            self._begin = self._now()

    def _stop(self, replaces: bool = False) -> None:
        """End a stretch of work; with several micro-batches the last one replaces the others."""
        if self._begin is None or not self._steps:
            return
        if replaces:
            self._steps[-1].clear()
        self._steps[-1].append((self._begin, self._now()))
        self._begin = self._begin if replaces else None

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
