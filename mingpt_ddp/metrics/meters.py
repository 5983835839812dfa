"""Average metrics over training steps, and measure how fast the steps are."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from mingpt_ddp.config.builders import BUILDERS
from mingpt_ddp.distributed.device.device import peak_memory
from mingpt_ddp.distributed.group.json_collectives import refuse_differing_names
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.tasks.outputs import COUNT, SUM


@dataclass
class Pause:
    """A pause in the training. Its time does not count when the speed is measured."""

    seconds: float = 0.0  # set when the pause ends


class Meter:
    """The losses and times of the steps since the last log line.

    They are added up without waiting for the device.

    Only `read`, `state`, `paused` and `clock(waits=True)` wait for the device.
    """

    def __init__(self, runtime: Runtime, items_per_step: int, unit: str) -> None:
        """
        Args:
            items_per_step: Tokens or samples that all ranks train in one step.
            unit: Name of these items in the tags of metrics, such as `tokens`.
        """
        self.runtime = runtime
        self.items_per_step = items_per_step
        self.unit = unit
        # Gradient norm of the last step, before clipping.
        self.grad_norm = torch.zeros((), device=runtime.device)
        self._paused_s = 0.0
        self._reset()

    def _reset(self) -> None:
        self._sums = {"loss": torch.zeros((), dtype=torch.float64, device=self.runtime.device)}
        self._steps = 0  # steps in the sums, including those that `load_state` restored
        self._timed_steps = 0  # steps whose time this object has measured
        self._data_s = 0.0
        self._since = self.runtime.now()

    def record(self, losses: dict[str, Tensor], grad_norm: Tensor, data_time_s: float) -> None:
        """Add one step.

        Args:
            losses: This rank's shares of the losses and metrics, by name. Added up over all ranks,
                they are the step's mean losses, and the sums and counts of its metrics.
            grad_norm: Gradient norm of the step, before clipping.
            data_time_s: Seconds that the step has waited for data.
        """
        for name, loss in losses.items():
            if name in self._sums:
                self._sums[name] = self._sums[name] + loss
            else:
                self._sums[name] = loss.double()
        self.grad_norm = grad_norm
        self._data_s += data_time_s
        self._steps += 1
        self._timed_steps += 1

    @contextmanager
    def paused(self) -> Iterator[Pause]:
        """Exclude the time in this context from the speed, because it is not spent on steps.

        The pause begins once the GPU has done the steps that were queued before the context. It
        ends once the GPU has done the work that was queued in the context. Pauses may be nested.
        """
        pause = Pause()
        since = self._since
        paused_s = self._paused_s
        begin = self.runtime.now()
        yield pause
        pause.seconds = self.runtime.now() - begin
        self._since = since + pause.seconds
        self._paused_s = paused_s + pause.seconds

    def clock(self, waits: bool) -> float:
        """Read a clock that stops in pauses. Return its seconds.

        Args:
            waits: Wait until the GPU has done all queued work before reading the clock.
        """
        now = self.runtime.now() if waits else time.perf_counter()
        return now - self._paused_s

    def read(self) -> dict[str, float]:
        """Return the metrics of the steps since the last call by tag, and reset.

        This is a collective: all ranks must call it.

        Return {} if there was no step.
        """
        sums, steps = self.state()
        if steps == 0:
            return {}
        elapsed = max(self.runtime.now() - self._since, 1e-9)
        divisor = max(1, self._timed_steps)
        metrics = means(sums, steps)
        metrics["train/grad_norm"] = float(self.grad_norm)
        metrics[f"speed/{self.unit}_per_s"] = self._timed_steps * self.items_per_step / elapsed
        metrics["speed/step_ms"] = elapsed / divisor * 1e3
        metrics["speed/data_ms"] = self._data_s / divisor * 1e3
        if work_s := self.runtime.strategy.clock.read():
            metrics["speed/work_ms"] = work_s * 1e3
        metrics["memory/peak_mib"] = peak_memory(self.runtime.device) / 2**20
        self._reset()
        return metrics

    def state(self) -> tuple[dict[str, float], int]:
        """Return the sums over all ranks since the last `read`, and the number of steps.

        This is a collective: all ranks must call it.
        """
        group = self.runtime.group
        with group.waiting():  # reading waits for a GPU
            names = ["loss", *sorted(self._sums.keys() - {"loss"})]  # the same order on all ranks
            sums = torch.stack([self._sums[name] for name in names]).cpu()
        # A user's hooks may name metrics freely. Check that all ranks have the same names.
        if BUILDERS["action"]:
            group.check_agreement(names, refuse_differing_names)
        totals = group.all_reduce(sums)
        return dict(zip(names, totals.tolist(), strict=True)), self._steps

    def load_state(self, sums: dict[str, float], steps: int) -> None:
        """Restore the sums and the number of steps that `state` has returned.

        Rank zero takes the whole sums and the other ranks zeros, so that `state` returns the same
        sums bit for bit.
        """
        zeros = dict.fromkeys(sums, 0.0)
        sums_of_rank = self.runtime.group.env.call_on_rank_zero(lambda: sums) or zeros
        self._sums = {}
        for name, total in sums_of_rank.items():
            self._sums[name] = torch.tensor(total, dtype=torch.float64, device=self.runtime.device)
        self._steps = steps


def means(sums: dict[str, float], steps: int) -> dict[str, float]:
    """Compute the mean losses and metrics, by tag, from their sums over several steps."""
    metrics = {}
    for name, total in sums.items():
        if name.startswith(SUM):
            metric = name.removeprefix(SUM)
            if count := sums[COUNT + metric]:
                metrics[f"train/{metric}"] = total / count
        elif not name.startswith(COUNT):
            metrics[f"train/{name}"] = total / steps
    return metrics
