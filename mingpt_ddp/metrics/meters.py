"""What is measured while training: losses and times between two log steps, and a TensorBoard directory per rank."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mingpt_ddp.distributed.runtime import Runtime

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

NATS_PER_BIT = math.log(2)


@dataclass(frozen=True)
class TrainMetrics:
    """Means over the steps since the last log step."""

    loss: float  # nats per character, over all ranks
    grad_norm: float  # of the last step, before clipping
    tokens_per_s: float  # over all ranks
    step_s: float  # seconds per step of this rank
    data_time_s: float  # of it, fetching the batch
    peak_memory: int  # bytes, of this rank


class Meter:
    """Adds up without waiting for the device; `read` is the only place that does."""

    def __init__(self, runtime: Runtime, tokens_per_step: int) -> None:
        self.runtime = runtime
        self.tokens_per_step = tokens_per_step
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=runtime.device)
        self._grad_norm = torch.zeros((), device=runtime.device)
        self._steps_of_loss = 0
        self._start_clock()

    def _start_clock(self) -> None:
        self._steps, self._data_s = 0, 0.0
        self._since = time.perf_counter()

    def record(self, loss: Tensor, grad_norm: Tensor, data_time_s: float) -> None:
        """
        Args:
            loss: this rank's share of the step's mean loss; the shares of all ranks add up to it.
        """
        self._loss_sum += loss
        self._grad_norm = grad_norm
        self._data_s += data_time_s
        self._steps += 1
        self._steps_of_loss += 1

    def pause(self, seconds: float) -> None:
        """Leave out time that was not spent on steps."""
        self._since += seconds

    def read(self) -> TrainMetrics:
        """A collective: all ranks call it at the same step. Starts anew."""
        loss_sum, steps = self.state()
        elapsed = max(time.perf_counter() - self._since, 1e-9)
        readings = TrainMetrics(
            loss=loss_sum / max(1, steps),
            grad_norm=self.grad_norm(),
            tokens_per_s=self._steps * self.tokens_per_step / elapsed,
            step_s=elapsed / max(1, self._steps),
            data_time_s=self._data_s / max(1, self._steps),
            peak_memory=self.runtime.peak_memory(),
        )
        self._loss_sum.zero_()
        self._steps_of_loss = 0
        self._start_clock()
        return readings

    @property
    def is_empty(self) -> bool:
        """Whether no step has been recorded since the last reading."""
        return self._steps_of_loss == 0

    def grad_norm(self) -> float:
        """Of the last step."""
        return float(self._grad_norm)

    def state(self) -> tuple[float, int]:
        """A collective: the sum of the losses since the last reading over all ranks, and of how many steps."""
        return float(self.runtime.group.all_reduce(self._loss_sum.cpu().reshape(1).clone())), self._steps_of_loss

    def load_state(self, loss_sum: float, steps: int) -> None:
        """Continue an interval that a snapshot cut in two."""
        self._loss_sum.fill_(loss_sum if self.runtime.group.is_rank_zero else 0.0)
        self._steps_of_loss = steps


HPARAMS = ".hparams"  # the end of the name of an event file that has nothing else


class TensorBoardLogger:
    """This rank's TensorBoard directory. What concerns the whole run stands in rank 0's alone."""

    def __init__(self, directory: Path, first_step: int, is_main: bool) -> None:
        """What was logged from `first_step` on belongs to an attempt that did not last: TensorBoard drops it."""
        self._directory, self._first_step, self._is_main = str(directory), first_step, is_main

    def open(self) -> None:
        """Begin; without it, the first thing written does. TensorBoard takes a fifth of a second to load."""
        _ = self._writer

    @cached_property
    def _writer(self) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(self._directory, purge_step=self._first_step)

    @property
    def _is_open(self) -> bool:
        return "_writer" in vars(self)

    def go_back(self, first_step: int) -> None:
        """Drop what was logged from `first_step` on: it will be logged anew."""
        if self._is_open:
            self._writer.close()
            del self._writer
            time.sleep(1.0)  # the name of an event file has the second in it, and readers go by the names
        self._first_step = first_step

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """What this rank measured."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def results(self, step: int, values: dict[str, float]) -> None:
        """What all ranks found together."""
        if self._is_main:
            self.scalars(step, values)

    def text(self, step: int, tag: str, text: str) -> None:
        if self._is_main:
            self._writer.add_text(tag, "\n".join(f"    {line}" for line in text.splitlines()), step)

    def hparams(self, config: dict[str, Any], results: dict[str, float]) -> None:
        """Fill the HParams tab, in this directory, not in one below it, and anew: an earlier end may have done so."""
        if self._is_main:
            self.open()
            directory = Path(self._directory)
            for old in directory.glob(f"*{HPARAMS}"):
                old.unlink()
            flat = {f"{group}.{key}": value for group, keys in config.items() for key, value in keys.items()}
            plain = {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in flat.items()}
            others = set(directory.iterdir())
            self._writer.add_hparams(plain, results, run_name=".")
            for new in set(directory.iterdir()) - others:
                new.rename(f"{new}{HPARAMS}")

    def flush(self) -> None:
        if self._is_open:
            self._writer.flush()

    def close(self) -> None:
        if self._is_open:
            self._writer.close()
