"""Evaluate a model: the task's metrics over a split, every item once, over all ranks."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp.data.dataloader import Split
from mingpt_ddp.distributed.logs import progress_bar
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.models import eval_mode
from mingpt_ddp.tasks.task import Task


class Evaluator:
    """Means of the task's metrics over its splits."""

    def __init__(self, task: Task, runtime: Runtime) -> None:
        self.task = task
        self.runtime = runtime
        self.splits = {name: task.split(name, runtime.device) for name in task.split_names()}

    @torch.no_grad()
    def run(
        self, model: nn.Module, name: str, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Return the metrics by name, those of a further split as <split>_<metric>. A collective.

        Args:
            name: of the split, `val` or `test`, with which further ones are measured; {} is
                returned if there is none.
            stop: polled before every batch; if it returns True on any rank, all ranks return None.
        """
        metrics: dict[str, float] = {}
        for other, split in self.splits.items():
            if split is not None and (other == name or other.startswith(f"{name}_")):
                measured = self._measure(model, split, stop)
                if measured is None:
                    return None
                prefix = other.removeprefix(name)[1:]
                metrics |= {
                    f"{prefix}_{key}" if prefix else key: value for key, value in measured.items()
                }
        return metrics

    def _measure(
        self, model: nn.Module, split: Split, stop: Callable[[], bool]
    ) -> dict[str, float] | None:
        """Return the metrics of a split; batch i is computed by copy i mod their number of the
        model.
        """
        group = self.runtime.group
        sums: dict[str, Tensor] = {}
        counts: dict[str, Tensor | int] = {}
        stopped = False
        bar = progress_bar(group.env, len(split), "evaluating", "batch")
        with eval_mode(model), bar:
            for batch, own in self._passes(split):
                if stopped := self._is_stopped(stop()):
                    break
                group.set_activity("evaluating")
                with self.runtime.autocast():
                    metrics = self.task.metrics(model, self.runtime.to_device(batch))
                for name, (value, n) in metrics.items() if own else ():
                    sums[name] = sums.get(name, 0) + torch.as_tensor(value).double()
                    counts[name] = counts.get(name, 0) + n
                bar.update(group.data_size)
        parts = group.all_gather(
            (stopped, {name: (float(sums[name]), int(counts[name])) for name in sums})
        )
        if any(stopped for stopped, _ in parts):
            return None
        names = list(dict.fromkeys(name for _, part in parts for name in part))
        totals = {
            name: [
                sum(column)
                for column in zip(*(p[name] for _, p in parts if name in p), strict=True)
            ]
            for name in names
        }
        return {name: total / n for name, (total, n) in totals.items()}

    def _passes(self, split: Split) -> Iterator[tuple[Any, bool]]:
        """Yield the batches of this rank, and whether they count: the others make up for a rank
        that has more.
        """
        group = self.runtime.group
        own = len(range(group.data_rank, len(split), group.data_size))
        most = -(-len(split) // group.data_size) if self.runtime.strategy.shards_model else own
        first = (next(iter(split.batches(0, group.data_size))) for _ in range(own, most))
        numbered = enumerate(chain(split.batches(group.data_rank, group.data_size), first))
        return ((batch, i < own) for i, batch in numbered)

    def _is_stopped(self, stopped: bool) -> bool:
        """Return whether to stop: on any rank, if the next forward pass is a collective."""
        group = self.runtime.group
        return (
            any(group.all_gather(stopped))
            if self.runtime.strategy.shards_model
            else group.any_in_copy(stopped)
        )
